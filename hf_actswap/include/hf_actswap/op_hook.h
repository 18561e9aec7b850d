// Marks begin and end of an operator from C++, so that the planner of hf_actswap sees it: the same marks as
// `hf_actswap.op_hook` in Python, for an extension whose kernels no PyTorch operator surrounds.
//
//     #include <hf_actswap/op_hook.h>
//
//     at::Tensor gmm(const at::Tensor& x, const at::Tensor& w) {
//       hf_actswap::OpHook hook("gmm", {x, w});
//       at::Tensor y = ...;
//       hook.outputs({y});
//       return y;
//     }
//
// Include path: the folder `include` beside `hf_actswap.__file__`. In a process that has not imported hf_actswap the
// marks do nothing. Call it with the GIL or without; the marks are PyTorch operators.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/util/Exception.h>

#include <cstdint>
#include <exception>
#include <optional>
#include <string>
#include <vector>

namespace hf_actswap {

class OpHook {
 public:
  OpHook(const std::string& name, std::vector<at::Tensor> inputs) {
    const auto begin = find("hf_actswap::op_begin");
    end_ = find("hf_actswap::op_end");
    if (!begin || !end_) return;
    uncaught_ = std::uncaught_exceptions();
    begin->typed<void(c10::string_view, int64_t, at::TensorList)>().call(name, call(), inputs);
    inputs_ = std::move(inputs);  // on the device until the end: the guard evicts nothing that is held
  }

  // Tells which tensors the operator has made.
  void outputs(const std::vector<at::Tensor>& tensors) {
    outputs_.insert(outputs_.end(), tensors.begin(), tensors.end());
  }

  ~OpHook() {
    if (!end_) return;
    const bool failed = std::uncaught_exceptions() > uncaught_;
    try {
      end_->typed<void(int64_t, at::TensorList, bool, int64_t)>().call(call(), outputs_, failed, 0);
    } catch (...) {
      if (!failed) TORCH_WARN("hf_actswap: the end of an operator could not be marked");
    }
  }

  OpHook(const OpHook&) = delete;
  OpHook& operator=(const OpHook&) = delete;

 private:
  static std::optional<c10::OperatorHandle> find(const char* name) {
    return c10::Dispatcher::singleton().findSchema({name, ""});
  }

  int64_t call() const { return static_cast<int64_t>(reinterpret_cast<std::uintptr_t>(this)); }

  std::optional<c10::OperatorHandle> end_;
  std::vector<at::Tensor> inputs_, outputs_;
  int uncaught_ = 0;
};

}  // namespace hf_actswap
