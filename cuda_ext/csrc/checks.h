// What every launcher does with its arguments before it takes a pointer: each message names the operator, the argument,
// what it is and what it must be.
#pragma once

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#include <initializer_list>
#include <sstream>
#include <stdexcept>
#include <string>

namespace raylm {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

template <typename... Parts>
[[noreturn]] void fail(const char* op, const Parts&... parts) {
  std::ostringstream message;
  message << "raylm::" << op << ": ";
  (message << ... << parts);
  throw std::runtime_error(message.str());
}

inline const char* dtype_name(ScalarType dtype) {
  switch (dtype) {
    case ScalarType::Float: return "float32";
    case ScalarType::BFloat16: return "bfloat16";
    case ScalarType::Half: return "float16";
    case ScalarType::Double: return "float64";
    case ScalarType::Int: return "int32";
    case ScalarType::Long: return "int64";
    case ScalarType::Bool: return "bool";
    case ScalarType::Byte: return "uint8";
    case ScalarType::Float8_e4m3fn: return "float8_e4m3fn";
    default: return "another dtype";
  }
}

// One tensor argument; each check returns the argument again, so that they read as a list.
class Arg {
 public:
  Arg(const char* op, const char* name, const Tensor& tensor) : op_(op), name_(name), tensor_(tensor) {}

  const Arg& on_cpu() const {
    if (!tensor_.is_cpu()) fail(op_, name_, " is not on the CPU");
    return *this;
  }

  const Arg& on_device_of(const Tensor& other) const {
    if (!tensor_.is_cuda() || tensor_.get_device_index() != other.get_device_index()) {
      fail(op_, name_, " is not on the CUDA device of the first argument");
    }
    return *this;
  }

  const Arg& dtype(std::initializer_list<ScalarType> allowed) const {
    std::string names;
    for (const ScalarType dtype : allowed) {
      if (tensor_.scalar_type() == dtype) return *this;
      names += (names.empty() ? "" : " or ") + std::string(dtype_name(dtype));
    }
    fail(op_, name_, " is ", dtype_name(tensor_.scalar_type()), ", must be ", names);
  }

  const Arg& floating() const { return dtype({ScalarType::Float, ScalarType::BFloat16, ScalarType::Half}); }

  const Arg& dim(int64_t dim) const {
    if (tensor_.dim() != dim) fail(op_, name_, " has ", tensor_.dim(), " dimensions, must have ", dim);
    return *this;
  }

  const Arg& size(int64_t dim, int64_t expected, const char* why) const {
    if (tensor_.size(dim) != expected) {
      fail(op_, name_, " has size ", tensor_.size(dim), " in dimension ", dim, ", must have ", expected, " (", why, ")");
    }
    return *this;
  }

  const Arg& last_contiguous() const {
    const int64_t last = tensor_.dim() - 1;
    if (last >= 0 && tensor_.size(last) > 1 && tensor_.stride(last) != 1) {
      fail(op_, name_, " has stride ", tensor_.stride(last), " in its last dimension, must be 1");
    }
    return *this;
  }

  const Arg& contiguous() const {
    if (!tensor_.is_contiguous()) fail(op_, name_, " must be contiguous");
    return *this;
  }

 private:
  const char* op_;
  const char* name_;
  const Tensor& tensor_;
};

}  // namespace raylm
