from pkgutil import extend_path

# Python 3.15 has a `profiling` package (PEP 799) that cProfile, hence torch.compile, imports.
__path__ = extend_path(__path__, __name__)
