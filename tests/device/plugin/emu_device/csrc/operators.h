// Operators: any operator of torch, issued to the current stream and run late.
//
// Shapes come from an operator's Meta kernel and values from its CPU kernel, which the stream's thread runs on CPU
// tensors at the kernels' addresses. For an operator without a Meta kernel, or whose result is no tensor, the host waits
// for the stream.
#pragma once
#include <ATen/native/Resize.h>
#include <ATen/native/TensorFactories.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_as_complex_native.h>
#include <ATen/ops/view_as_real_native.h>
#include <ATen/ops/view_native.h>
#include <torch/library.h>
#include <random>

#include "device.h"

namespace emu {
inline bool is_emu(const at::Tensor& tensor) { return tensor.defined() && tensor.device().type() == EMU; }

inline void keep_flags(const at::Tensor& to, const at::Tensor& from) {
  if (from.unsafeGetTensorImpl()->is_wrapped_number()) to.unsafeGetTensorImpl()->set_wrapped_number(true);
  if (from.is_conj()) to._set_conj(true);
  if (from.is_neg()) to._set_neg(true);
}
// A CPU tensor at the address where kernels work; does not keep the memory alive, as no kernel does.
inline at::Tensor view_for_kernel(const at::Tensor& tensor) {
  auto& storage = tensor.storage();
  auto begin = storage.data_ptr().get();
  c10::Storage view(c10::Storage::use_byte_size_t(), storage.nbytes(),
                    c10::DataPtr(begin ? DeviceMemory::kernel_address(begin) : nullptr, c10::Device(c10::kCPU)),
                    nullptr, false);
  auto made = at::detail::make_tensor<c10::TensorImpl>(std::move(view), c10::DispatchKeySet(c10::DispatchKey::CPU),
                                                       tensor.dtype());
  made.unsafeGetTensorImpl()->set_storage_offset(tensor.storage_offset());
  made.unsafeGetTensorImpl()->set_sizes_and_strides(tensor.sizes(), tensor.strides());
  keep_flags(made, tensor);
  return made;
}
// The memory of a host tensor; does not keep it alive.
inline at::Tensor view_host(const at::Tensor& tensor) {
  auto made =
      at::from_blob(tensor.data_ptr(), tensor.sizes(), tensor.strides(), tensor.options().requires_grad(false));
  keep_flags(made, tensor);
  return made;
}
inline at::Tensor view_as_meta(const at::Tensor& tensor) {
  at::Tensor meta(at::detail::empty_strided_meta(tensor.sizes(), tensor.strides(), tensor.scalar_type()));
  if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) meta.unsafeGetTensorImpl()->set_wrapped_number(true);
  return meta;
}

inline at::Tensor empty_strided(c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<at::ScalarType> dtype,
                                std::optional<c10::Layout>, std::optional<c10::Device> device, std::optional<bool>) {
  c10::DeviceGuard guard(c10::Device(EMU, index_of(device.value_or(c10::Device(EMU)))));
  return at::detail::empty_strided_generic(size, stride, &DeviceMemory::instance(),
                                           c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                           c10::dtype_or_default(dtype));
}
inline at::Tensor empty(c10::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<c10::Layout>,
                        std::optional<c10::Device> device, std::optional<bool>,
                        std::optional<c10::MemoryFormat> format) {
  c10::DeviceGuard guard(c10::Device(EMU, index_of(device.value_or(c10::Device(EMU)))));
  return at::detail::empty_generic(size, &DeviceMemory::instance(),
                                   c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), c10::dtype_or_default(dtype),
                                   format);
}

// Applies `change` to every tensor inside an argument.
template <class F>
c10::IValue map_tensors(const c10::IValue& value, F&& change) {
  if (value.isTensor()) return value.toTensor().defined() ? c10::IValue(change(value.toTensor())) : value;
  if (value.isTensorList()) {
    c10::List<at::Tensor> list;
    for (const at::Tensor& one : value.toTensorList()) list.push_back(one.defined() ? change(one) : one);
    return list;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> list;
    for (const std::optional<at::Tensor>& one : value.toOptionalTensorList())
      list.push_back(one.has_value() && one->defined() ? std::optional<at::Tensor>(change(*one)) : one);
    return list;
  }
  return value;
}

inline void log_kernel(const std::string& name) {
  auto& to = log();
  std::lock_guard lock(to.mutex);
  if (to.logs_kernels) to.kernels.emplace_back(current_device, current_stream(current_device).id(), name);
}

// Sums in another order each time, as with atomics and split-K: what is summed over is shuffled first.
inline void shuffle_sums(const std::string& name, torch::jit::Stack& given) {
  static std::mutex mutex;
  static auto& generator = *new at::Generator(at::detail::createCPUGenerator(std::random_device{}()));
  auto shuffle = [&](size_t left, int64_t left_dim, size_t right, int64_t right_dim) {
    auto a = given[left].toTensor(), b = given[right].toTensor();
    at::Tensor order;
    {
      std::lock_guard lock(mutex);
      order = at::randperm(a.size(left_dim), generator, at::kLong);
    }
    given[left] = a.index_select(left_dim, order);
    given[right] = b.index_select(right_dim, order);
  };
  if (name == "aten::mm") shuffle(0, 1, 1, 0);
  if (name == "aten::addmm") shuffle(1, 1, 2, 0);
  if (name == "aten::bmm") shuffle(0, 2, 1, 1);
  if (name == "aten::embedding_dense_backward") {
    given[0] = given[0].toTensor().flatten(0, -2);
    given[1] = given[1].toTensor().flatten();
    shuffle(0, 0, 1, 0);
  }
}

// A product in float32 whose terms are added one after the other, as kernels do that do not split a long sum.
inline bool multiply_in_order(const std::string& name, torch::jit::Stack& given) {
  size_t first = name == "aten::addmm" ? 1 : 0;
  if (name != "aten::mm" && name != "aten::addmm") return false;
  auto a = given[first].toTensor(), b = given[first + 1].toTensor();
  if (a.scalar_type() != at::kFloat) return false;
  auto sum = at::zeros({a.size(0), b.size(1)}, a.options());
  for (int64_t k = 0; k < a.size(1); ++k) sum.addcmul_(a.select(1, k).unsqueeze(1), b.select(0, k).unsqueeze(0));
  if (first) sum = given[0].toTensor() * given[3].toScalar() + sum * given[4].toScalar();
  bool writes_out = given.size() > (first ? 5 : 2);
  given = {writes_out ? given.back().toTensor().copy_(sum) : sum};
  return true;
}

// CUDA computes normalisation in float32, and its statistics are float32; CPU kernels keep them in bfloat16.
inline void widen_norms(const std::string& name, torch::jit::Stack& given) {
  if (name != "aten::native_layer_norm" && name != "aten::native_layer_norm_backward") return;
  for (auto& one : given)
    one = map_tensors(one, [](const at::Tensor& tensor) { return tensor.to(at::kFloat); });
}

struct Call {
  const c10::OperatorHandle& op;
  torch::jit::Stack arguments;
  std::optional<c10::Device> device;
  bool resizes_out = false;  // an output of no elements is to be resized; others are taken to be right

  Call(const c10::OperatorHandle& op, torch::jit::Stack* stack) : op(op) {
    const auto& declared = op.schema().arguments();
    arguments = torch::jit::pop(*stack, declared.size());
    bool has_host_tensor = false;
    for (size_t i = 0; i < declared.size(); ++i) {
      const auto& one = arguments[i];
      map_tensors(one, [&](const at::Tensor& tensor) {
        if (is_emu(tensor) && !device) device = tensor.device();
        has_host_tensor |= tensor.is_cpu() && tensor.dim() > 0;
        return tensor;
      });
      if (one.isDevice() && one.toDevice().type() == EMU && !device) device = one.toDevice();
      resizes_out |= declared[i].is_out() && one.isTensor() && one.toTensor().numel() == 0;
    }
    // Indices may lie on the host, as on CUDA.
    auto may_mix = op.schema().name().find("index") != std::string::npos;
    TORCH_CHECK(!has_host_tensor || may_mix, "emu: ", op.operator_name(),
                ": expected all tensors to be on the same device, but found emu and cpu");
  }

  bool returns_only_tensors() const {
    for (const auto& one : op.schema().returns()) {
      auto kind = one.type()->kind();
      if (kind != c10::TypeKind::TensorType &&
          !(kind == c10::TypeKind::ListType && one.type()->containedType(0)->kind() == c10::TypeKind::TensorType))
        return false;
    }
    return true;
  }
  bool returns_new_tensors() const {
    bool is_new = false;
    for (const auto& one : op.schema().returns()) {
      auto alias = one.alias_info();
      TORCH_CHECK_NOT_IMPLEMENTED(!alias || alias->isWrite(), "emu has no view ", op.operator_name());
      is_new |= !alias;
    }
    return is_new;
  }
  // The results' shapes, by the Meta kernel; none if there is no such kernel.
  std::optional<torch::jit::Stack> infer_shapes() {
    if (!op.hasComputedKernelForDispatchKey(c10::DispatchKey::Meta)) return std::nullopt;
    torch::jit::Stack metas;
    for (const auto& one : arguments) {
      if (one.isDevice()) metas.emplace_back(c10::Device(c10::kMeta));
      else if (one.isGenerator()) metas.emplace_back();
      else metas.push_back(map_tensors(one, view_as_meta));
    }
    auto inferred = metas;
    try {
      op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::Meta), &inferred);
    } catch (const std::exception&) {
      return std::nullopt;
    }
    const auto& declared = op.schema().arguments();
    for (size_t i = 0; i < declared.size(); ++i)
      if (declared[i].is_out() && arguments[i].isTensor() &&
          arguments[i].toTensor().sizes() != metas[i].toTensor().sizes())
        arguments[i].toTensor().resize_(metas[i].toTensor().sizes());
    return inferred;
  }
  // What the kernel gets: the device's memory, the host's numbers as they are now, and random numbers drawn now.
  torch::jit::Stack take_arguments() const {
    torch::jit::Stack given;
    const auto& declared = op.schema().arguments();
    for (size_t i = 0; i < declared.size(); ++i) {
      const auto& one = arguments[i];
      auto type = declared[i].type();
      if (type->kind() == c10::TypeKind::OptionalType) type = type->expectRef<c10::OptionalType>().getElementType();
      if (type->kind() == c10::TypeKind::GeneratorType) {
        auto generator = one.isGenerator() ? one.toGenerator() : default_generator(current_device);
        given.emplace_back(at::check_generator<GeneratorImpl>(generator)->draw());
      } else if (one.isDevice()) {
        given.emplace_back(c10::Device(c10::kCPU));
      } else {
        given.push_back(map_tensors(one, [](const at::Tensor& tensor) {
          if (is_emu(tensor)) return view_for_kernel(tensor);
          auto copy = tensor.detach().clone();
          keep_flags(copy, tensor);
          return copy;
        }));
      }
    }
    return given;
  }
  c10::IValue find_written(size_t i) const {
    const auto& schema = op.schema();
    for (size_t j = 0; j < schema.arguments().size(); ++j)
      if (schema.arguments()[j].alias_info() &&
          *schema.arguments()[j].alias_info() == *schema.returns()[i].alias_info())
        return arguments[j];
    TORCH_CHECK(false, "emu: no argument is returned by ", op.operator_name());
  }
};

inline void fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  check_device();
  Call call(op, stack);
  c10::DeviceGuard guard(c10::Device(EMU, index_of(call.device.value_or(c10::Device(EMU)))));
  auto queue = current_queue(current_device);
  const auto& returns = op.schema().returns();
  bool needs_shapes = call.returns_new_tensors() || call.resizes_out;
  std::optional<torch::jit::Stack> shapes;
  bool is_late = call.returns_only_tensors();
  if (is_late && needs_shapes) {
    shapes = call.infer_shapes();
    is_late = shapes.has_value();
  }
  auto given = call.take_arguments();
  auto name = op.schema().name();
  log_kernel(name);
  if (!is_late) {
    {
      std::lock_guard lock(log().mutex);
      ++log().kernels_without_shape[name];
    }
    wait_on_host(queue, queue->last(), name);
    at::AutoDispatchBelowADInplaceOrView below;
    op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), &given);
    for (size_t i = 0; i < returns.size(); ++i)
      stack->push_back(returns[i].alias_info() ? call.find_written(i) : map_tensors(given[i], [](const at::Tensor& one) {
        return one.to(c10::Device(EMU, current_device));
      }));
    return;
  }
  std::vector<std::pair<size_t, c10::IValue>> results;
  for (size_t i = 0; i < returns.size(); ++i) {
    if (returns[i].alias_info()) {
      stack->push_back(call.find_written(i));
      continue;
    }
    auto made = map_tensors(shapes->at(i), [](const at::Tensor& like) {
      return empty_strided(like.sizes(), like.strides(), like.scalar_type(), {}, c10::Device(EMU, current_device), {});
    });
    results.emplace_back(i, map_tensors(made, view_for_kernel));
    stack->push_back(made);
  }
  queue->push([op, name, given = std::move(given), results = std::move(results)]() mutable {
    widen_norms(name, given);
    if (random_sums) shuffle_sums(name, given);
    if (!ONE_ACCUMULATOR || !multiply_in_order(name, given))
      op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), &given);
    for (auto& [i, into] : results) {
      std::vector<at::Tensor> computed;
      map_tensors(given[i], [&](const at::Tensor& one) { computed.push_back(one); return one; });
      size_t next = 0;
      map_tensors(into, [&](const at::Tensor& one) {
        auto& result = computed.at(next++);
        TORCH_CHECK(result.sizes() == one.sizes(), name, " is not as its Meta kernel says");
        one.copy_(result);
        return one;
      });
    }
  });
}

// Copies: late between devices' tensors and pinned memory if they may be, else the host waits, as CUDA's does.
inline at::Tensor copy_from(const at::Tensor& from, const at::Tensor& to, bool non_blocking) {
  check_device();
  c10::DeviceGuard guard(is_emu(to) ? to.device() : from.device());
  auto queue = current_queue(current_device);
  auto& pinned = PinnedMemory::instance();
  auto source = from.sizes() == to.sizes() ? from : from.expand(to.sizes());
  if (is_emu(from) && is_emu(to)) {
    log_kernel("copy");
    if (from.device() != to.device()) {  // both devices wait for each other, as on CUDA
      auto other = current_queue(from.device().index());
      wait_on_stream(queue, {other, other->last()});
      auto number =
          queue->push([source = view_for_kernel(source), target = view_for_kernel(to)] { target.copy_(source); });
      wait_on_stream(other, {queue, number});
    } else {
      queue->push([source = view_for_kernel(source), target = view_for_kernel(to)] { target.copy_(source); });
    }
  } else if (is_emu(to)) {
    log_kernel("copy to the device");
    bool is_late = non_blocking && pinned.owns(from.data_ptr());
    auto number = queue->push([source = is_late ? view_host(source) : source.detach().clone(),
                               target = view_for_kernel(to)] { target.copy_(source); });
    if (is_late) pinned.note_use(from.data_ptr(), {queue, number});
    else if (!non_blocking) wait_on_host(queue, number, "copy to the device");
  } else {
    log_kernel("copy to the host");
    bool is_late = non_blocking && pinned.owns(to.data_ptr());
    if (is_late && to.numel() && to.is_non_overlapping_and_dense()) std::memset(to.data_ptr(), POISON, to.nbytes());
    auto number = queue->push([source = view_for_kernel(source), target = view_host(to)] { target.copy_(source); });
    if (is_late) pinned.note_use(to.data_ptr(), {queue, number});
    else wait_on_host(queue, number, "copy to the host");
  }
  return to;
}
inline at::Tensor copy_from_and_resize(const at::Tensor& from, const at::Tensor& to) {
  to.resize_(from.sizes());
  return copy_from(from, to, false);
}
inline at::Scalar local_scalar_dense(const at::Tensor& tensor) {
  auto queue = current_queue(tensor.device().index());
  wait_on_host(queue, queue->last(), "item");
  return view_for_kernel(tensor).item();
}
inline const at::Tensor& resize_(const at::Tensor& self, c10::IntArrayRef size,
                                 std::optional<c10::MemoryFormat> format) {
  c10::DeviceGuard guard(self.device());
  auto stride = c10::contiguous_strides(size);
  auto needed = at::detail::computeStorageNbytes(size, stride, self.dtype().itemsize(), self.storage_offset());
  if (self.storage().nbytes() < needed) Hooks().resizePrivateUse1Bytes(self.storage(), needed);
  self.unsafeGetTensorImpl()->set_sizes_contiguous(size);
  if (format && *format != c10::MemoryFormat::Preserve) self.unsafeGetTensorImpl()->empty_tensor_restride(*format);
  return self;
}
inline at::Tensor& set_storage_offset(at::Tensor& self, at::Storage storage, int64_t offset, c10::IntArrayRef size,
                                      c10::IntArrayRef stride) {
  auto impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(storage));
  impl->set_storage_offset(offset);
  if (stride.data()) impl->set_sizes_and_strides(size, stride);
  else impl->set_sizes_contiguous(size);
  return self;
}
inline at::Tensor& set_storage(at::Tensor& self, at::Storage storage) {
  int64_t size = storage.nbytes() / self.dtype().itemsize();
  return set_storage_offset(self, std::move(storage), 0, {size}, {});
}
inline at::Tensor& set_tensor(at::Tensor& self, const at::Tensor& source) {
  return set_storage_offset(self, source.storage(), source.storage_offset(), source.sizes(), source.strides());
}
inline void record_stream(at::Tensor& tensor, c10::Stream stream) {
  DeviceMemory::instance().recordStream(tensor.storage().data_ptr(), stream);
}
inline std::tuple<at::Tensor, at::Tensor> native_dropout(const at::Tensor& input, double p, std::optional<bool> train) {
  if (!train.value_or(true) || p == 0) return {input.clone(), at::ones_like(input, at::kBool)};
  auto mask = at::empty_like(input, at::kBool).bernoulli_(1 - p);
  return {at::mul(input, mask).mul_(p == 1 ? 0. : 1 / (1 - p)), mask};
}
inline int64_t fused_sdp_choice(const at::Tensor&, const at::Tensor&, const at::Tensor&,
                                const std::optional<at::Tensor>&, double, bool, std::optional<double>, bool) {
  return 0;  // math
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>()); }
TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("as_strided", at::native::as_strided_tensorimpl);
  m.impl("view", at::native::view);
  m.impl("_reshape_alias", at::native::_reshape_alias);
  m.impl("unfold", at::native::unfold);
  m.impl("view_as_real", at::native::view_as_real);
  m.impl("view_as_complex", at::native::view_as_complex);
  m.impl("resize_", resize_);
  m.impl("_copy_from", copy_from);
  m.impl("_copy_from_and_resize", copy_from_and_resize);
  m.impl("_local_scalar_dense", local_scalar_dense);
  m.impl("set_.source_Storage", set_storage);
  m.impl("set_.source_Storage_storage_offset", set_storage_offset);
  m.impl("set_.source_Tensor", set_tensor);
  m.impl("record_stream", record_stream);
  m.impl("native_dropout", native_dropout);
  m.impl("_fused_sdp_choice", fused_sdp_choice);
  // Without these, torch would compose them of other operators.
  m.impl("native_layer_norm", torch::CppFunction::makeFromBoxedFunction<&fallback>());
  m.impl("native_layer_norm_backward", torch::CppFunction::makeFromBoxedFunction<&fallback>());
}
}  // namespace emu
