// A device for torch's PrivateUse1 slot: host memory under another name. Kernels it lacks run on the CPU, on copies.
#include <ATen/EmptyTensor.h>
#include <ATen/core/Tensor.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/view_native.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/core/impl/alloc_cpu.h>
#include <torch/library.h>

namespace {

constexpr auto kind = c10::DeviceType::PrivateUse1;

struct Allocator final : c10::Allocator {
  c10::DataPtr allocate(size_t size) override {
    void* data = c10::alloc_cpu(size);
    return {data, data, &c10::free_cpu, c10::Device(kind, 0)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &c10::free_cpu; }
  void copy_data(void* to, const void* from, size_t size) const override { default_copy_data(to, from, size); }
};
Allocator allocator;
const c10::DispatchKeySet keys(c10::DispatchKey::PrivateUse1);

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
};

// It has one stream, the host's: an event has happened when it is recorded.
struct Guard final : c10::impl::DeviceGuardImplInterface {
  static constexpr auto static_type = kind;
  c10::Stream only() const { return c10::Stream(c10::Stream::DEFAULT, c10::Device(kind, 0)); }

  c10::DeviceType type() const override { return kind; }
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }
  c10::Device getDevice() const override { return {kind, 0}; }
  c10::Device exchangeDevice(c10::Device) const override { return {kind, 0}; }
  void setDevice(c10::Device) const override {}
  void uncheckedSetDevice(c10::Device) const noexcept override {}
  c10::Stream getStream(c10::Device) const override { return only(); }
  c10::Stream getDefaultStream(c10::Device) const override { return only(); }
  c10::Stream getNewStream(c10::Device, int) const override { return only(); }
  c10::Stream exchangeStream(c10::Stream) const override { return only(); }
  void record(void**, const c10::Stream&, const c10::DeviceIndex, const c10::EventFlag) const override {}
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void destroyEvent(void*, const c10::DeviceIndex) const noexcept override {}
  bool queryStream(const c10::Stream&) const override { return true; }
  void synchronizeStream(const c10::Stream&) const override {}
};

at::ScalarType type_of(std::optional<at::ScalarType> dtype) { return dtype.value_or(at::ScalarType::Float); }

at::Tensor empty(at::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                 std::optional<at::Device>, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  return at::detail::empty_generic(size, &allocator, keys, type_of(dtype), format);
}

at::Tensor empty_strided(at::IntArrayRef size, at::IntArrayRef stride, std::optional<at::ScalarType> dtype,
                         std::optional<at::Layout>, std::optional<at::Device>, std::optional<bool>) {
  return at::detail::empty_strided_generic(size, stride, &allocator, keys, type_of(dtype));
}

at::Tensor on_host(const at::Tensor& t) {
  return at::from_blob(t.data_ptr(), t.sizes(), t.strides(), t.options().device(at::kCPU).requires_grad(false));
}

at::Tensor copy_from(const at::Tensor& self, const at::Tensor& into, bool) {
  on_host(into).copy_(on_host(self));
  return into;
}

at::Tensor& set_source(at::Tensor& self, at::Storage storage, int64_t offset, at::IntArrayRef size,
                       at::IntArrayRef stride) {
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(storage));
  impl->set_sizes_and_strides(size, stride, offset);
  return self;
}

void fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack) { at::native::cpu_fallback(op, stack); }

at::Tensor strided(const at::Tensor& t, at::IntArrayRef size, at::IntArrayRef stride, std::optional<int64_t> offset) {
  return at::native::as_strided_tensorimpl(t, size, stride, offset);
}

at::Tensor view(const at::Tensor& t, at::IntArrayRef size) { return at::native::view(t, size); }

const at::Tensor& resize(const at::Tensor& self, at::IntArrayRef size, std::optional<at::MemoryFormat>) {
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_sizes_contiguous(size);
  const size_t bytes = (impl->storage_offset() + impl->numel()) * self.itemsize();
  if (self.storage().nbytes() < bytes) {
    impl->set_storage_keep_dtype(c10::Storage(c10::Storage::use_byte_size_t(), bytes, &allocator, true));
  }
  return self;
}

at::Tensor alias(const at::Tensor& t, at::IntArrayRef size, at::IntArrayRef stride) {
  return at::native::_reshape_alias(t, size, stride);
}

// Results of operations that run on the host come back through this: `into` may have no room yet.
at::Tensor copy_from_and_resize(const at::Tensor& self, const at::Tensor& into) {
  if (into.sizes() != self.sizes()) {
    resize(into, self.sizes(), std::nullopt);
  }
  return copy_from(self, into, false);
}

}  // namespace

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>()); }

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  c10::SetAllocator(kind, &allocator);
  at::RegisterPrivateUse1HooksInterface(new Hooks());
  m.impl("empty.memory_format", &empty);
  m.impl("empty_strided", &empty_strided);
  m.impl("_copy_from", &copy_from);
  m.impl("_copy_from_and_resize", &copy_from_and_resize);
  m.impl("as_strided", &strided);
  m.impl("_reshape_alias", &alias);
  m.impl("resize_", &resize);
  m.impl("view", &view);
  m.impl("set_.source_Storage_storage_offset", &set_source);
}
