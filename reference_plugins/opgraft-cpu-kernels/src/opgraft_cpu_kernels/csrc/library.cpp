// The torch library of the plugin, and the choice of a path as torch ops. `_set_path` is for library.py alone, which
// keeps the name of the path in force.

#include "tensors.h"

namespace opgraft_cpu_kernels {
namespace {

std::vector<std::string> path_names() {
  std::vector<std::string> names;
  for (const Path* path : supported_paths()) names.emplace_back(path->name);
  return names;
}

std::string path_name() { return path().name; }

void set_path_by_name(const std::string& name) {
  for (const Path* path : supported_paths()) {
    if (name == path->name) return set_path(*path);
  }
  TORCH_CHECK_VALUE(false, "path is '", name, "', expected one of those that this CPU has: ", path_names());
}

}  // namespace

TORCH_LIBRARY(opgraft_cpu_kernels, library) {
  library.def("path() -> str", &path_name);
  library.def("paths() -> str[]", &path_names);
  library.def("_set_path(str path) -> ()", &set_path_by_name);
}

}  // namespace opgraft_cpu_kernels
