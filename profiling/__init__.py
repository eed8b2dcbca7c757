from pkgutil import extend_path

# Python 3.15's standard library has a `profiling` package (PEP 799), which cProfile and hence torch.compile import.
__path__ = extend_path(__path__, __name__)
