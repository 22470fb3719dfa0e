// A stand-in accelerator: torch's PrivateUse1 device on host memory, with the rules of CUDA.
//
// Every operator runs as the CPU's kernel on tensors that share the device's memory, after the checks that CUDA makes:
// no mixed devices, no generator of another device. Fresh memory holds garbage, copies to and from pinned memory that
// need not be waited for are not done before the device is waited for, recurrent layers have no backward pass in eval
// mode, float32 products are rounded as TF32 where torch's flags allow it, and sums by index come in another order each
// time where CUDA uses atomic additions.
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Context.h>
#include <ATen/EmptyTensor.h>
#include <ATen/TensorOperators.h>
#include <ATen/core/CachingHostAllocator.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/convolution.h>
#include <ATen/ops/convolution_backward.h>
#include <ATen/ops/gru_native.h>
#include <ATen/ops/lstm_native.h>
#include <ATen/ops/resize_native.h>
#include <ATen/ops/rnn_relu_native.h>
#include <ATen/ops/rnn_tanh_native.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <set>
#include <string>
#include <vector>

namespace {
using at::IntArrayRef, at::Tensor, c10::Device, c10::DeviceIndex, c10::IValue;
template <class T> using Optional = std::optional<T>;
constexpr auto kStandIn = c10::DeviceType::PrivateUse1;
constexpr DeviceIndex kDevices = 2;
thread_local DeviceIndex current = 0;
std::recursive_mutex mutex;
using Lock = std::lock_guard<std::recursive_mutex>;

// Switches and counters, reached as torch.ops.stand_in.*
std::atomic<bool> has_float64{true};
std::atomic<int64_t> kernels{0}, waits{0}, overwritten{0}, atomic_sums{0};
Device resolved(Optional<Device> device) {
  return Device(kStandIn, device && device->index() >= 0 ? device->index() : current);
}

// Memory ----
void* garbage(size_t size) {
  void* memory = nullptr;
  TORCH_CHECK(!posix_memalign(&memory, 64, std::max<size_t>(size, 1)), "stand-in: out of memory");
  return std::memset(memory, 0xFF, size);  // NaN, or -1
}
struct DeviceAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t size) override {
    void* memory = size ? garbage(size) : nullptr;
    return {memory, memory, &std::free, Device(kStandIn, current)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &std::free; }
  void copy_data(void* to, const void* from, size_t size) const override { std::memcpy(to, from, size); }
} device_allocator;
std::set<const void*> pinned;
void free_pinned(void* memory) {
  Lock hold(mutex);
  pinned.erase(memory), std::free(memory);
}
struct PinnedAllocator final : at::HostAllocator {
  c10::DataPtr allocate(size_t size) override {
    Lock hold(mutex);
    void* memory = garbage(size);
    pinned.insert(memory);
    return {memory, memory, &free_pinned, Device(c10::kCPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free_pinned; }
  void copy_data(void* to, const void* from, size_t size) const override { std::memcpy(to, from, size); }
  bool record_event(void*, void*, c10::Stream) override { return true; }
  void empty_cache() override {}
  void reset_accumulated_stats() override {}
  void reset_peak_stats() override {}
  at::HostStats get_stats() override { return {}; }
} pinned_allocator;

// Copies that are under way ----
struct Copy { Tensor host, value; bool arrives; };  // at the host, where there is garbage until then, or leaves it
std::vector<Copy> under_way;
void synchronize() {
  Lock hold(mutex);
  ++waits;
  for (const Copy& copy : std::exchange(under_way, {})) {
    if (copy.arrives) copy.host.copy_(copy.value);
    else if (std::memcmp(copy.host.data_ptr(), copy.value.data_ptr(), copy.value.nbytes())) ++overwritten;
  }
}

// The device, its streams and its generators ----
struct Guard final : c10::impl::DeviceGuardImplInterface {
  static constexpr c10::DeviceType static_type = kStandIn;
  Guard() = default;
  explicit Guard(c10::DeviceType) {}
  c10::DeviceType type() const override { return kStandIn; }
  Device getDevice() const override { return {kStandIn, current}; }
  Device exchangeDevice(Device d) const override { return {kStandIn, std::exchange(current, d.index())}; }
  void setDevice(Device device) const override {
    TORCH_CHECK(device.index() >= 0 && device.index() < kDevices, "stand-in: no device ", int(device.index()));
    current = device.index();
  }
  void uncheckedSetDevice(Device device) const noexcept override { current = std::max<DeviceIndex>(device.index(), 0); }
  c10::Stream getStream(Device device) const override { return c10::Stream(c10::Stream::DEFAULT, device); }
  c10::Stream getDefaultStream(Device device) const override { return getStream(device); }
  c10::Stream getStreamFromGlobalPool(Device device, bool) const override { return getStream(device); }
  c10::Stream getNewStream(Device device, int) const override { return getStream(device); }
  c10::Stream exchangeStream(c10::Stream stream) const override { return getStream(stream.device()); }
  DeviceIndex deviceCount() const noexcept override { return kDevices; }
  void record(void**, const c10::Stream&, const DeviceIndex, const c10::EventFlag) const override {}
  void block(void*, const c10::Stream&) const override {}
  void destroyEvent(void*, const DeviceIndex) const noexcept override {}
  bool queryEvent(void*) const override { return true; }
  bool queryStream(const c10::Stream&) const override { return true; }
  void synchronizeStream(const c10::Stream&) const override { synchronize(); }
  void synchronizeEvent(void*) const override { synchronize(); }
  void synchronizeDevice(const DeviceIndex) const override { synchronize(); }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);
struct Generator final : at::CPUGeneratorImpl {
  explicit Generator(DeviceIndex index) {
    device_ = resolved(Device(kStandIn, index));
    key_set_ = c10::DispatchKeySet(c10::DispatchKey::PrivateUse1);
  }
  static c10::DeviceType device_type() { return kStandIn; }
};
at::Generator& default_generator(DeviceIndex index) {
  static std::vector<at::Generator> all{at::make_generator<Generator>(0), at::make_generator<Generator>(1)};
  return all.at(index < 0 ? current : index);
}
struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex deviceCount() const override { return kDevices; }
  DeviceIndex getCurrentDevice() const override { return current; }
  void setCurrentDevice(DeviceIndex index) const override { current = index; }
  DeviceIndex exchangeDevice(DeviceIndex index) const override { return std::exchange(current, index); }
  DeviceIndex maybeExchangeDevice(DeviceIndex d) const override { return d < 0 ? current : std::exchange(current, d); }
  const at::Generator& getDefaultGenerator(DeviceIndex index) const override { return default_generator(index); }
  at::Generator getNewGenerator(DeviceIndex index) const override { return at::make_generator<Generator>(index); }
  at::Allocator* getPinnedMemoryAllocator() const override { return &pinned_allocator; }
  at::Device getDeviceFromPtr(void*) const override { return {kStandIn, current}; }
  bool isPinnedPtr(const void* data) const override { return (void)Lock(mutex), pinned.count(data); }
} hooks;

// Tensors of the device as tensors of the host, and back ----
void refuse_float64(at::ScalarType dtype) {
  if (!has_float64 && (dtype == at::kDouble || dtype == at::kComplexDouble))
    TORCH_CHECK_TYPE(false, "stand-in: the device has no float64");
}
template <class Held> c10::DataPtr shared(const c10::Storage& storage, Held held, Device device) {
  return {storage.mutable_data(), new Held(std::move(held)), [](void* p) { delete static_cast<Held*>(p); }, device};
}
Tensor alias_of(const Tensor& t, c10::Storage storage, c10::DispatchKey key) {
  auto made = at::detail::make_tensor<c10::TensorImpl>(std::move(storage), c10::DispatchKeySet(key), t.dtype());
  made.unsafeGetTensorImpl()->set_sizes_and_strides(t.sizes(), t.strides(), t.storage_offset());
  return made;
}
Tensor on_host(const Tensor& t) {
  if (!t.defined() || !t.is_privateuseone()) return t;
  const auto& own = t.storage();  // resizable, for out= of another size
  c10::Storage storage(c10::Storage::use_byte_size_t(), own.nbytes(), shared(own, own, Device(c10::kCPU)),
                       c10::GetAllocator(c10::kCPU), true);
  return alias_of(t, std::move(storage), c10::DispatchKey::CPU);
}
struct Known { Tensor device, host; };  // an argument, and its alias
Tensor on_device(const Tensor& t, Device device, const std::vector<Known>& arguments) {
  if (!t.defined() || !t.is_cpu()) return t;
  for (const Known& known : arguments)
    if (known.host.is_same(t)) return known.device;
  TORCH_CHECK(t.layout() == c10::kStrided, "stand-in: not for ", t.layout(), " tensors");
  refuse_float64(t.scalar_type());
  const void* data = t.storage().data();
  for (const Known& known : arguments)
    if (data && known.host.storage().data() == data)
      return alias_of(t, known.device.storage(), c10::DispatchKey::PrivateUse1);
  c10::Storage storage(c10::Storage::use_byte_size_t(), t.storage().nbytes(), shared(t.storage(), t, device),
                       &device_allocator, true);
  return alias_of(t, std::move(storage), c10::DispatchKey::PrivateUse1);
}
template <class Function> IValue mapped(const IValue& value, Function function) {
  if (value.isTensor()) return function(value.toTensor());
  if (value.isTensorList()) {
    std::vector<Tensor> made;
    for (const Tensor& t : value.toTensorVector()) made.push_back(function(t));
    return made;
  }
  if (value.isOptionalTensorList()) {
    c10::List<Optional<Tensor>> made;
    for (const auto& t : value.toOptionalTensorVector()) made.push_back(t ? Optional<Tensor>(function(*t)) : std::nullopt);
    return made;
  }
  return value;
}
Tensor tf32(const Tensor& t) {  // 10 bits of mantissa, to nearest
  if (!t.defined() || t.scalar_type() != at::kFloat) return t;
  return t.contiguous().view(at::kInt).add(0x1000).bitwise_and(~0x1FFF).view(at::kFloat);
}
bool tf32_in(at::Float32Op op) {
  return at::globalContext().float32Precision(at::Float32Backend::CUDA, op) == at::Float32Precision::TF32;
}

// Operators ----
constexpr auto kMixed = "Expected all tensors to be on the same device, but found at least two devices, ";
const std::set<std::string> kTakesHostTensors{  // as indices, or as values of one number
    "aten::index", "aten::index_put_", "aten::_index_put_impl_", "aten::index_put", "aten::_unsafe_index"};
const std::set<std::string> kWaits{  // the result's size depends on values
    "aten::nonzero", "aten::masked_select", "aten::_unique2", "aten::unique_dim", "aten::unique_consecutive",
    "aten::repeat_interleave", "aten::equal", "aten::bincount"};
const std::set<std::string> kProducts{"aten::mm", "aten::bmm", "aten::addmm", "aten::baddbmm"};
const std::set<std::string> kAtomicSums{"aten::index_add", "aten::scatter_add"};

// Atomic additions come in any order: in the opposite one every second time.
void reorder(const std::string& name, std::vector<IValue>& args) {
  if (at::globalContext().deterministicAlgorithms() || ++atomic_sums % 2) return;
  const int64_t dim = args[1].toInt();
  Tensor index = args[2].toTensor(), source = args[3].toTensor();
  if (!index.dim() || !source.dim()) return;
  const bool whole_rows = name == "aten::index_add";
  for (int64_t axis = 0; !whole_rows && axis < index.dim(); ++axis) source = source.narrow(axis, 0, index.size(axis));
  args[2] = index.flip(whole_rows ? 0 : dim);
  args[3] = source.flip(dim);
}
void run(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  const std::string& name = schema.name();
  std::vector<IValue> args = torch::jit::pop(*stack, schema.arguments().size());
  Optional<Device> device;
  for (const IValue& arg : args)
    mapped(arg, [&](const Tensor& t) {
      if (!t.defined() || !t.is_privateuseone()) return t;
      TORCH_CHECK(!device || *device == t.device(), kMixed, *device, " and ", t.device(), "! (", name, ")");
      device = t.device();
      return t;
    });
  for (const IValue& arg : args)
    if (!device && arg.isDevice()) device = resolved(arg.toDevice());
  if (!device) device = resolved(std::nullopt);
  std::vector<Known> known;
  at::Generator generator = default_generator(device->index());
  bool random = op.hasTag(at::Tag::nondeterministic_seeded), masked = false;
  for (size_t i = 0; i < args.size(); ++i) {
    const auto& argument = schema.arguments()[i];
    const bool written = argument.alias_info() && argument.alias_info()->isWrite();
    args[i] = mapped(args[i], [&](const Tensor& t) {
      if (!t.defined()) return t;
      TORCH_CHECK(!t.is_cpu() || (!t.dim() && !written) || kTakesHostTensors.count(name),
                  kMixed, *device, " and cpu! (argument ", argument.name(), " of ", name, ")");
      masked = masked || (i && t.scalar_type() == at::kBool);
      Tensor host = on_host(t);
      if (t.is_privateuseone()) known.push_back({t, host});
      const bool factor = argument.name() != "self" || name == "aten::mm" || name == "aten::bmm";
      return factor && !written && kProducts.count(name) && tf32_in(at::Float32Op::MATMUL) ? tf32(host) : host;
    });
    if (args[i].isDevice()) args[i] = Device(c10::kCPU);
    if (args[i].isGenerator()) {
      generator = args[i].toGenerator();
      TORCH_CHECK(generator.device().type() == kStandIn, "Expected a 'stand_in' device type for generator but found '",
                  generator.device().type(), "'");
      args[i] = IValue();
      random = true;
    }
  }
  if (kAtomicSums.count(name)) reorder(name, args);
  if (kWaits.count(name) || (masked && name == "aten::index")) synchronize();
  ++kernels;
  stack->insert(stack->end(), args.begin(), args.end());
  const c10::DispatchKeySet cpu(c10::DispatchKey::CPU);
  if (random) {  // the CPU's generator lends its place
    Lock hold(mutex);
    at::Generator host = at::detail::getDefaultCPUGenerator();
    const Tensor before = host.get_state();
    host.set_state(generator.get_state());
    op.redispatchBoxed(cpu, stack);
    generator.set_state(host.get_state());
    host.set_state(before);
  } else {
    op.redispatchBoxed(cpu, stack);
  }
  for (const Known& k : known) {  // out= of another size
    if (k.host.sizes() == k.device.sizes() && k.host.storage().data() == k.device.storage().data()) continue;
    c10::DeviceGuard guard(*device);
    at::native::resize_(k.device, k.host.sizes(), std::nullopt);
    on_host(k.device).copy_(k.host);
  }
  const size_t first = stack->size() - schema.returns().size();
  for (size_t i = first; i < stack->size(); ++i)
    (*stack)[i] = mapped((*stack)[i], [&](const Tensor& t) { return on_device(t, *device, known); });
}
Tensor empty(IntArrayRef size, Optional<at::ScalarType> dtype, Optional<at::Layout>, Optional<Device> device,
             Optional<bool> pin, Optional<at::MemoryFormat> format) {
  TORCH_CHECK(!pin.value_or(false), "Only dense CPU tensors can be pinned");
  refuse_float64(c10::dtype_or_default(dtype));
  c10::DeviceGuard guard(resolved(device));
  return at::detail::empty_generic(size, &device_allocator, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                   c10::dtype_or_default(dtype), format);
}
Tensor empty_strided(IntArrayRef size, IntArrayRef stride, Optional<at::ScalarType> dtype, Optional<at::Layout>,
                     Optional<Device> device, Optional<bool>) {
  refuse_float64(c10::dtype_or_default(dtype));
  c10::DeviceGuard guard(resolved(device));
  return at::detail::empty_strided_generic(size, stride, &device_allocator,
                                           c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), c10::dtype_or_default(dtype));
}
Tensor copy_from(const Tensor& from, const Tensor& to, bool non_blocking) {
  const Tensor source = on_host(from), target = on_host(to);
  const Tensor& host = from.is_cpu() ? from : to;
  ++kernels;
  if (to.is_cpu() && from.scalar_type() != to.scalar_type()) refuse_float64(to.scalar_type());
  Lock hold(mutex);
  if (!host.is_cpu()) {  // on the device
    target.copy_(source);
  } else if (non_blocking && from.is_cpu()) {
    target.copy_(source);
    if (from.is_pinned() && from.is_contiguous()) under_way.push_back({from.detach(), from.clone(), false});
  } else if (non_blocking && to.is_pinned() && to.is_non_overlapping_and_dense()) {
    under_way.push_back({to.detach(), source.to(to.scalar_type(), /*non_blocking=*/false, /*copy=*/true), true});
    std::memset(to.data_ptr(), 0xFF, to.nbytes());
  } else {
    synchronize();
    target.copy_(source);
  }
  return to;
}
at::Scalar item(const Tensor& self) {
  synchronize();
  return on_host(self).item();
}
const Tensor& resize_(const Tensor& self, IntArrayRef size, Optional<at::MemoryFormat> format) {
  c10::DeviceGuard guard(self.device());
  return at::native::resize_(self, size, format);
}
Tensor& set_(Tensor& self, at::Storage source, int64_t offset, IntArrayRef size, IntArrayRef stride) {
  auto* impl = self.unsafeGetTensorImpl();
  at::native::checkSetStorage(self, std::move(source), offset, size, stride);
  impl->set_storage_offset(offset);
  stride.data() ? impl->set_sizes_and_strides(size, stride) : impl->set_sizes_contiguous(size);
  return self;
}
Tensor& set_storage_(Tensor& self, at::Storage source) {
  return set_(self, source, 0, {int64_t(source.nbytes() / self.dtype().itemsize())}, {});
}
void check_together(std::initializer_list<Tensor> tensors) {
  for (const Tensor& t : tensors)
    TORCH_CHECK(!t.defined() || t.device() == tensors.begin()->device(), kMixed, tensors.begin()->device(), " and ",
                t.device(), "! (convolution)");
  ++kernels;
}
Tensor factor(const Tensor& t) { return tf32_in(at::Float32Op::CONV) ? tf32(on_host(t)) : on_host(t); }
Tensor convolution(const Tensor& x, const Tensor& w, const Optional<Tensor>& bias, IntArrayRef stride, IntArrayRef padding,
                   IntArrayRef dilation, bool transposed, IntArrayRef output_padding, int64_t groups) {
  const Tensor b = bias.value_or(Tensor());
  check_together({x, w, b});
  return on_device(at::convolution(factor(x), factor(w), on_host(b), stride, padding, dilation, transposed, output_padding,
                                   groups), x.device(), {});
}
std::tuple<Tensor, Tensor, Tensor> convolution_backward(
    const Tensor& grad, const Tensor& x, const Tensor& w, IntArrayRef stride, IntArrayRef padding, IntArrayRef dilation,
    bool transposed, IntArrayRef output_padding, int64_t groups, std::array<bool, 3> mask) {
  check_together({grad, x, w});
  const int64_t channels = transposed ? w.size(1) * groups : w.size(0);
  auto [a, b, c] = at::convolution_backward(factor(grad), factor(x), factor(w), IntArrayRef{channels}, stride, padding,
                                            dilation, transposed, output_padding, groups, mask);
  return {on_device(a, x.device(), {}), on_device(b, x.device(), {}), on_device(c, x.device(), {})};
}

// Recurrent layers ----
// The fused cells, out of operators that have a derivative: no backward formula of theirs is needed.
Tensor plus(const Tensor& gates, const Optional<Tensor>& bias) { return bias && bias->defined() ? gates + *bias : gates; }
std::tuple<Tensor, Tensor, Tensor> lstm_cell(const Tensor& input, const Tensor& hidden, const Tensor& cell,
                                             const Optional<Tensor>& input_bias, const Optional<Tensor>& hidden_bias) {
  const auto gates = (plus(hidden, hidden_bias) + plus(input, input_bias)).chunk(4, 1);
  const Tensor next = gates[1].sigmoid() * cell + gates[0].sigmoid() * gates[2].tanh();
  return {gates[3].sigmoid() * next.tanh(), next, Tensor()};
}
std::tuple<Tensor, Tensor> gru_cell(const Tensor& input, const Tensor& hidden, const Tensor& state,
                                    const Optional<Tensor>& input_bias, const Optional<Tensor>& hidden_bias) {
  const auto a = plus(input, input_bias).chunk(3, 1), b = plus(hidden, hidden_bias).chunk(3, 1);
  const Tensor reset = (a[0] + b[0]).sigmoid(), update = (a[1] + b[1]).sigmoid(), fresh = (a[2] + reset * b[2]).tanh();
  return {fresh + update * (state - fresh), Tensor()};
}

// cuDNN, where it is enabled, has no backward pass in eval mode.
Tensor refuse(const Tensor&) { TORCH_CHECK(false, "cudnn RNN backward can only be called in training mode"); }
template <class Outputs> Outputs refusing_backward(Outputs outputs, bool train) {
  const bool refuses = !train && at::globalContext().userEnabledCuDNN() && std::get<0>(outputs).requires_grad();
  if (refuses) std::apply([](const auto&... output) { (output.register_hook(&refuse), ...); }, outputs);
  return outputs;
}
#define RECURRENT(NAME, STATES)                                                                                       \
  m.impl(#NAME ".input", [](const Tensor& x, STATES h, at::TensorList w, bool b, int64_t n, double p, bool train,     \
                            bool both, bool first) {                                                                  \
    return refusing_backward(at::native::NAME(x, h, w, b, n, p, train, both, first), train);                          \
  });                                                                                                                 \
  m.impl(#NAME ".data", [](const Tensor& x, const Tensor& sizes, STATES h, at::TensorList w, bool b, int64_t n,       \
                           double p, bool train, bool both) {                                                         \
    return refusing_backward(at::native::NAME(x, sizes, h, w, b, n, p, train, both), train);                          \
  });
void add_cells(torch::Library& m) { m.impl("_thnn_fused_lstm_cell", &lstm_cell).impl("_thnn_fused_gru_cell", &gru_cell); }
TORCH_LIBRARY_IMPL(aten, AutogradPrivateUse1, m) {
  RECURRENT(lstm, at::TensorList)
  RECURRENT(gru, const Tensor&)
  RECURRENT(rnn_tanh, const Tensor&)
  RECURRENT(rnn_relu, const Tensor&)
  add_cells(m);
}

// Registration ----
TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&run>()); }
TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  add_cells(m);
  m.impl("empty.memory_format", &empty).impl("empty_strided", &empty_strided);
  m.impl("_efficientzerotensor", [](IntArrayRef size, Optional<at::ScalarType> dtype, Optional<at::Layout> layout,
                                    Optional<Device> device, Optional<bool> pin) {
    return empty(size, dtype, layout, device, pin, {}).zero_();  // tangents of constants; the CPU's have no memory
  });
  m.impl("_copy_from", &copy_from).impl("_local_scalar_dense", &item).impl("resize_", &resize_);
  m.impl("set_.source_Storage", &set_storage_).impl("set_.source_Storage_storage_offset", &set_);
  m.impl("_has_compatible_shallow_copy_type", [](const Tensor&, const Tensor&) { return true; });
  m.impl("record_stream", [](Tensor&, at::Stream) {});
  m.impl("convolution_overrideable", &convolution);
  m.impl("convolution_backward_overrideable", &convolution_backward);
  // Kernels of their own on the CPU and on CUDA, and put together from others elsewhere.
  for (const char* name : {"native_layer_norm", "native_group_norm", "native_dropout", "native_dropout_backward", "addr",
                           "dot", "vdot", "embedding_dense_backward"})
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&run>());
}
TORCH_LIBRARY(stand_in, m) {
  m.def("device_count", []() -> int64_t { return kDevices; });
  m.def("current_device", []() -> int64_t { return current; });
  m.def("set_device", [](int64_t index) { Guard().setDevice({kStandIn, DeviceIndex(index)}); });
  m.def("synchronize", &synchronize);
  m.def("rng_state", [](int64_t index) { return default_generator(DeviceIndex(index)).get_state(); });
  m.def("set_rng_state", [](int64_t index, const Tensor& t) { default_generator(DeviceIndex(index)).set_state(t); });
  m.def("seed", [](int64_t index, int64_t seed) { default_generator(DeviceIndex(index)).set_current_seed(seed); });
  m.def("set_float64", [](bool on) { has_float64 = on; });
  m.def("kernels", [] { return kernels.load(); });
  m.def("waits", [] { return waits.load(); });
  m.def("overwritten", [] { return overwritten.load(); });
  m.def("atomic_sums", [] { return atomic_sums.load(); });
  at::RegisterPrivateUse1HooksInterface(&hooks);
  c10::SetAllocator(kStandIn, &device_allocator);
  at::setHostAllocator(kStandIn, &pinned_allocator);
}
}  // namespace
