// One step of PowerSGD for several simulated workers, with the steps from a file.
//
//   runner (script|aoti) STEPS SCRIPT INPUTS OUTPUTS
//
// STEPS holds the phases: a TorchScript file, or an AOTInductor package. SCRIPT is a TorchScript
// file, from which orthogonalization always comes: packages hold the passes over memory only.
// INPUTS is torch.save([q, gradient_0, residual_0, gradient_1, ...]). Written to OUTPUTS for
// torch.load, and printed as sums: the averaged gradient, then each worker's residual.

#include <torch/csrc/inductor/aoti_package/model_package_loader.h>
#include <torch/script.h>

#include <cstdio>
#include <fstream>
#include <functional>
#include <iostream>
#include <iterator>
#include <map>
#include <memory>
#include <string>
#include <vector>

namespace {

using Tensors = std::vector<torch::Tensor>;
using Phase = std::function<torch::Tensor(const std::string&, const Tensors&)>;

Tensors read(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  std::vector<char> bytes((std::istreambuf_iterator<char>(file)), std::istreambuf_iterator<char>());
  Tensors tensors;
  const c10::IValue list = torch::jit::pickle_load(bytes);
  for (const c10::IValue& value : list.toListRef()) {
    tensors.push_back(value.toTensor());
  }
  return tensors;
}

void write(const std::string& path, const Tensors& tensors) {
  const std::vector<char> bytes = torch::jit::pickle_save(c10::IValue(tensors));
  std::ofstream(path, std::ios::binary).write(bytes.data(), static_cast<std::streamsize>(bytes.size()));
}

Phase load_script(const std::string& path) {
  auto module = std::make_shared<torch::jit::Module>(torch::jit::load(path));
  return [module](const std::string& name, const Tensors& tensors) {
    std::vector<c10::IValue> arguments(tensors.begin(), tensors.end());
    const c10::IValue result = module->get_method(name)(arguments);
    return result.isTensor() ? result.toTensor() : torch::Tensor();
  };
}

Phase load_package(const std::string& path) {
  using Loader = torch::inductor::AOTIModelPackageLoader;
  auto loaders = std::make_shared<std::map<std::string, std::unique_ptr<Loader>>>();
  for (const char* name : {"compress_", "project", "decompress_"}) {
    loaders->emplace(name, std::make_unique<Loader>(path, name));
  }
  return [loaders](const std::string& name, const Tensors& tensors) {
    return loaders->at(name)->run(tensors).at(0);
  };
}

torch::Tensor mean(const Tensors& tensors) { return torch::stack(tensors).mean(0); }

Tensors step(const Phase& phase, torch::jit::Module& script, const Tensors& inputs) {
  const torch::Tensor& q = inputs.at(0);
  Tensors matrices, residuals, p_local, q_local;
  for (size_t i = 1; i + 1 < inputs.size(); i += 2) {
    matrices.push_back(inputs[i]);
    residuals.push_back(inputs[i + 1]);
    p_local.push_back(phase("compress_", {matrices.back(), residuals.back(), q}));
  }
  const c10::IValue factors = c10::List<torch::Tensor>({mean(p_local)});
  const torch::Tensor p =
      script.get_method("orthogonalize_all")({factors, 0.0}).toTensorVector().at(0);
  for (const torch::Tensor& matrix : matrices) {
    q_local.push_back(phase("project", {matrix, p}));
  }
  const torch::Tensor q_mean = mean(q_local);
  for (size_t i = 0; i < matrices.size(); ++i) {
    phase("decompress_", {matrices[i], residuals[i], p, q_local[i], q_mean});
  }
  Tensors outputs = {matrices.at(0)};
  outputs.insert(outputs.end(), residuals.begin(), residuals.end());
  return outputs;
}

}  // namespace

int main(int count, char** arguments) {
  const std::vector<std::string> words(arguments, arguments + count);
  if (count != 6 || (words[1] != "script" && words[1] != "aoti")) {
    std::cerr << "usage: runner (script|aoti) STEPS SCRIPT INPUTS OUTPUTS\n";
    return 2;
  }
  try {
    const c10::InferenceMode guard;
    torch::jit::Module script = torch::jit::load(words[3]);
    const Phase phase = words[1] == "script" ? load_script(words[2]) : load_package(words[2]);
    const Tensors outputs = step(phase, script, read(words[4]));
    write(words[5], outputs);
    for (const torch::Tensor& output : outputs) {
      std::printf("%.6e\n", output.to(torch::kFloat64).abs().sum().item<double>());
    }
  } catch (const std::exception& error) {
    std::cerr << error.what() << '\n';
    return 1;
  }
  return 0;
}
