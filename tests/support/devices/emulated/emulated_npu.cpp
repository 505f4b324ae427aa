// An emulated accelerator: torch's PrivateUse1 device on host memory, with the CPU's arithmetic and a device's rules.
//
// A block is one allocation. A stream is a queue of late work; kernels are carried out at once, after all late work of
// their stream. A late copy fills its destination with poison when it is queued, and copies when its stream is flushed.
// `hccl` is a c10d backend whose collectives run in gloo on copies; results are written when its stream is flushed.
//
// A kernel that hangs has its results as others do; what waits for its device from then on never returns.
//
// `python.on_wait(kind)` is called without a lock held, whenever the host waits; `python.on_fault(kind)` says whether
// a fault that is due strikes.
#include <ATen/EmptyTensor.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/core/impl/alloc_cpu.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <torch/extension.h>

#include <fcntl.h>
#include <signal.h>
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <deque>
#include <limits>
#include <map>
#include <mutex>
#include <set>
#include <thread>

using at::Tensor;
constexpr auto NPU = c10::DeviceType::PrivateUse1;
constexpr int MAX_DEVICES = 16;
constexpr size_t ALIGNMENT = 512;  // sizes of allocations are multiples of it, as in a caching allocator
constexpr size_t PAGES = 1 << 20;  // blocks of this size on are whole pages, which processes can share
constexpr int QUERIES_UNTIL_DONE = 3;  // a late event is asked about so often before its work is carried out

// ---- settings, faults and counts ------------------------------------------------------------------------------------

static int num_devices = 8;
static std::atomic<size_t> capacity{size_t(64) << 30};
enum class Late { NEVER, ALWAYS, SEEDED };
static Late late_mode = Late::SEEDED;
static uint64_t late_seed = 0;
static std::atomic<uint64_t> num_copies{0};
static std::atomic<bool> is_lost{false}, hangs{false};
static std::mutex settings_mutex;
static std::map<std::string, int64_t> num_until_fault;
static py::object *on_wait = new py::object(), *on_fault = new py::object();  // never destroyed: threads outlive Python

static void count(const std::string& kind) {
  if (!Py_IsInitialized()) return;
  py::gil_scoped_acquire gil;
  if (*on_wait) (*on_wait)(kind);
}

// The host waits: for ever, without Python's lock, for a device with a kernel that never ends.
static void host_waits(const std::string& kind) {
  count(kind);
  if (!hangs) return;
  std::optional<py::gil_scoped_release> without_lock;
  if (PyGILState_Check()) without_lock.emplace();
  while (true) std::this_thread::sleep_for(std::chrono::seconds(1));
}

// Whether the fault of this kind strikes now: at the n-th call, if Python agrees.
static bool strikes(const std::string& kind) {
  {
    std::lock_guard<std::mutex> lock(settings_mutex);
    auto found = num_until_fault.find(kind);
    if (found == num_until_fault.end() || --found->second != 0) return false;
  }
  py::gil_scoped_acquire gil;
  return (*on_fault)(kind).cast<bool>();
}

static void require_device() {
  TORCH_CHECK(!is_lost, "NPU function error: device lost (emulated); restart the process");
}

// ---- memory ---------------------------------------------------------------------------------------------------------

using Place = std::pair<int, int64_t>;  // (device, stream)
struct Block {
  void* data;
  size_t size;
  int device;  // -1: pinned memory of the host
  Place writer{-1, 0};
  int64_t written = 0;  // the writer's number of issued operations then
  Block(void* memory, size_t bytes, int index) : data(memory), size(bytes), device(index) {}
  Block(const Block&) = delete;
  ~Block();
};
using BlockPtr = std::shared_ptr<Block>;
struct Usage {
  size_t allocated = 0, peak = 0, reserved = 0;
};
static std::mutex memory_mutex;
static Usage usage[MAX_DEVICES];
static std::map<const char*, size_t> pinned;
static thread_local c10::DeviceIndex current = 0;

// What all processes on this host have on the same devices, in a file that they map (EMULATED_NPU_SHARED).
constexpr int MAX_PROCESSES = 64;
struct Slot {
  std::atomic<int32_t> pid;
  std::atomic<uint64_t> allocated[MAX_DEVICES];
};
struct OfAll {
  std::atomic<uint64_t> peak[MAX_DEVICES];
  Slot slots[MAX_PROCESSES];
};
static OfAll* of_all = nullptr;
static Slot* own_slot = nullptr;
static int physical[MAX_DEVICES];  // the device of the host that each of this process is

static void share_usage(const std::string& path, const std::vector<int>& devices) {
  std::copy(devices.begin(), devices.end(), physical);
  int file = open(path.c_str(), O_RDWR | O_CREAT, 0600);
  TORCH_CHECK(file >= 0 && ftruncate(file, sizeof(OfAll)) == 0, "cannot share the usage of devices in ", path);
  of_all = static_cast<OfAll*>(mmap(nullptr, sizeof(OfAll), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0));
  close(file);
  for (auto& slot : of_all->slots) {
    int32_t before = slot.pid;
    if (before && kill(before, 0) == 0) continue;
    if (!slot.pid.compare_exchange_strong(before, getpid())) continue;
    for (auto& each : slot.allocated) each = 0;
    own_slot = &slot;
    return;
  }
  TORCH_CHECK(false, "more processes than ", MAX_PROCESSES, " share the devices");
}

// Memory of other processes that live on a device of this one.
static size_t of_others(int device) {
  size_t sum = 0;
  if (of_all)
    for (auto& slot : of_all->slots)
      if (&slot != own_slot && slot.pid && kill(slot.pid, 0) == 0) sum += slot.allocated[physical[device]];
  return sum;
}

static void note_usage(int device) {  // with memory_mutex
  if (!of_all) return;
  size_t own = usage[device].allocated, sum = own + of_others(device);
  own_slot->allocated[physical[device]] = own;
  auto& peak = of_all->peak[physical[device]];
  for (uint64_t before = peak; before < sum && !peak.compare_exchange_weak(before, sum);) {}
}

Block::~Block() {
  {
    std::lock_guard<std::mutex> lock(memory_mutex);
    if (device >= 0) {
      usage[device].allocated -= size;
      note_usage(device);
    } else pinned.erase(static_cast<const char*>(data));
  }
  if (size < PAGES) c10::free_cpu(data);
  else munmap(data, size);
}

// Whole pages of this process alone, or of the file at `place`.
static void* map_pages(size_t size, void* place = nullptr, int file = -1) {
  int flags = file < 0 ? MAP_PRIVATE | MAP_ANONYMOUS : MAP_SHARED | MAP_FIXED;
  void* data = mmap(place, size, PROT_READ | PROT_WRITE, flags, file, 0);
  TORCH_CHECK(data != MAP_FAILED, "cannot map ", size, " bytes");
  return data;
}

static void release(void* context) { delete static_cast<BlockPtr*>(context); }

static void reserve(size_t size) {
  bool strikes_now = strikes("oom");
  std::lock_guard<std::mutex> lock(memory_mutex);
  auto& used = usage[current];
  size_t others = of_others(current);
  TORCH_CHECK_WITH(OutOfMemoryError, !strikes_now && others + used.allocated + size <= capacity,
                   "NPU out of memory. Tried to allocate ", size, " bytes (NPU ", int(current), "; ", capacity.load(),
                   " bytes total capacity; ", used.allocated, " bytes already allocated, ", others,
                   " by other processes)");
  used.allocated += size;
  note_usage(current);
  used.peak = std::max(used.peak, used.allocated);
  used.reserved = std::max(used.reserved, used.allocated);
}

static c10::DataPtr allocate_block(size_t size, int device) {
  auto kind = device < 0 ? c10::Device(c10::kCPU) : c10::Device(NPU, current);
  if (size == 0) return {nullptr, kind};
  size = (size + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
  if (device >= 0) {
    require_device();
    reserve(size);
  }
  BlockPtr block(new Block(size < PAGES ? c10::alloc_cpu(size) : map_pages(size), size, device));
  if (device < 0) {
    std::lock_guard<std::mutex> lock(memory_mutex);
    pinned[static_cast<const char*>(block->data)] = size;
  }
  return {block->data, new BlockPtr(block), &release, kind};
}

template <bool ON_DEVICE>
struct Allocator final : c10::Allocator {
  c10::DataPtr allocate(size_t size) override { return allocate_block(size, ON_DEVICE ? current : -1); }
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* to, const void* from, size_t size) const override { std::memcpy(to, from, size); }
};
static Allocator<true> device_allocator;
static Allocator<false> pinned_allocator;
REGISTER_ALLOCATOR(NPU, &device_allocator);

// The block of a tensor on the device or in pinned memory; null for other memory of the host and for empty tensors.
static BlockPtr block_of(const Tensor& tensor) {
  if (!tensor.defined() || !tensor.has_storage()) return nullptr;
  const auto& pointer = tensor.storage().data_ptr();
  return pointer.get_deleter() == &release ? *static_cast<BlockPtr*>(pointer.get_context()) : nullptr;
}

// A tensor of the host on the same memory, without the device's rules.
static Tensor host_alias(const Tensor& tensor) {
  if (!tensor.defined() || !(tensor.is_privateuseone() || block_of(tensor))) return tensor;
  auto options = at::TensorOptions().dtype(tensor.dtype());
  if (tensor.numel() == 0) return at::empty_strided(tensor.sizes(), tensor.strides(), options);
  auto keep = block_of(tensor);
  auto made = at::from_blob(tensor.data_ptr(), tensor.sizes(), tensor.strides(), [keep](void*) {}, options);
  if (tensor.is_conj()) made._set_conj(true);
  if (tensor.is_neg()) made._set_neg(true);
  return made;
}

// What memory holds before late work has arrived: NaN, true, or an integer that is no index.
static void poison(const Tensor& on_host) {
  auto type = on_host.scalar_type();
  if (at::isFloatingType(type) || at::isComplexType(type)) {
    on_host.fill_(std::numeric_limits<double>::quiet_NaN());
  } else if (type == at::kBool) {
    on_host.fill_(true);
  } else {
    static const std::map<at::ScalarType, int64_t> LARGEST = {{at::kByte, 251}, {at::kChar, 113}, {at::kShort, 31991}};
    auto found = LARGEST.find(type);
    on_host.fill_(found == LARGEST.end() ? int64_t(2123456789) : found->second);
  }
}

// ---- streams --------------------------------------------------------------------------------------------------------

using Clock = std::map<Place, int64_t>;  // how many operations of each stream are known to have ended
struct Item {
  int64_t number;
  std::function<void()> before;  // waits for others; runs without a lock
  std::function<void()> run;
  BlockPtr source;
};
struct Stream {
  int64_t issued = 0;
  std::deque<std::shared_ptr<Item>> queue;
  Clock seen;
};
struct Event {
  Place place;
  int64_t number;
  Clock seen;
  int queries = 0;
};
static std::recursive_mutex streams_mutex;
using Lock = std::lock_guard<std::recursive_mutex>;
static std::map<Place, Stream> streams;
static Clock seen_by_host;
static std::atomic<int64_t> num_queued{0}, next_stream{1}, next_group{-1};
static thread_local int64_t current_stream[MAX_DEVICES] = {0};

static Place here(int device) { return {device, current_stream[device]}; }
static void merge(Clock& clock, const Clock& other) {
  for (auto& [place, number] : other) clock[place] = std::max(clock[place], number);
}

// Carries out the late work of a stream up to a number; another thread may do the same.
static void flush(Place place, int64_t number) {
  while (num_queued) {
    std::shared_ptr<Item> item;
    {
      Lock lock(streams_mutex);
      auto& queue = streams[place].queue;
      if (queue.empty() || queue.front()->number > number) return;
      item = queue.front();
    }
    std::exception_ptr failure;
    try {
      if (item->before) item->before();
    } catch (...) {
      failure = std::current_exception();
    }
    Lock lock(streams_mutex);
    auto& queue = streams[place].queue;
    if (queue.empty() || queue.front() != item) continue;
    queue.pop_front();
    num_queued--;
    if (failure) std::rethrow_exception(failure);
    if (item->run) {
      at::AutoDispatchBelowADInplaceOrView guard;
      item->run();
    }
  }
}
constexpr int64_t ALL = std::numeric_limits<int64_t>::max();

static void push(Place place, Item item) {
  Lock lock(streams_mutex);
  auto& stream = streams[place];
  item.number = ++stream.issued;
  stream.queue.push_back(std::make_shared<Item>(std::move(item)));
  num_queued++;
}

static std::shared_ptr<Event> record(Place place) {
  Lock lock(streams_mutex);
  auto& stream = streams[place];
  auto seen = stream.seen;
  seen[place] = stream.issued;
  return std::make_shared<Event>(Event{place, stream.issued, seen});
}

static void wait_for(Place place, const Event& event) {
  if (place == event.place) return;
  push(place, {0, [event] { flush(event.place, event.number); }});
  Lock lock(streams_mutex);
  merge(streams[place].seen, event.seen);
}

static void host_waited(const Event& event) {
  flush(event.place, event.number);
  Lock lock(streams_mutex);
  merge(seen_by_host, event.seen);
}

// Whether the last writer of this memory is another stream that `place` has not waited for.
static bool is_race(Place place, const BlockPtr& block) {
  if (!block || block->writer.first < 0 || block->writer == place) return false;
  auto& seen = streams[place].seen;
  return std::max(seen[block->writer], seen_by_host[block->writer]) < block->written;
}

static void mark_written(Place place, const BlockPtr& block) {
  if (!block) return;
  block->writer = place;
  block->written = streams[place].issued;
}

// An operation begins on the current stream of a device: all that is queued there is carried out.
static Place begin_kernel(int device) {
  if (strikes("lost")) is_lost = true;
  if (strikes("hang")) hangs = true;
  require_device();
  auto place = here(device);
  flush(place, ALL);
  Lock lock(streams_mutex);
  streams[place].issued++;
  return place;
}

static bool is_late() {
  if (late_mode != Late::SEEDED) return late_mode == Late::ALWAYS;
  uint64_t mixed = (late_seed * 0x9E3779B97F4A7C15ull) ^ (++num_copies * 0xBF58476D1CE4E5B9ull);
  mixed = (mixed ^ (mixed >> 31)) * 0x94D049BB133111EBull;
  return (mixed >> 61) != 0;  // seven of eight
}

struct Guard final : c10::impl::DeviceGuardImplInterface {
  static int index(c10::Device device) { return device.index() < 0 ? current : device.index(); }
  static Place place(const c10::Stream& stream) { return {stream.device_index(), stream.id()}; }
  static Event& event(void* pointer) { return **static_cast<std::shared_ptr<Event>*>(pointer); }
  static c10::Stream stream(c10::Device device, int64_t id) {
    return c10::Stream(c10::Stream::UNSAFE, {NPU, c10::DeviceIndex(index(device))}, id);
  }
  c10::DeviceType type() const override { return NPU; }
  c10::Device exchangeDevice(c10::Device device) const override {
    auto before = getDevice();
    setDevice(device);
    return before;
  }
  c10::Device getDevice() const override { return {NPU, current}; }
  void setDevice(c10::Device device) const override { uncheckedSetDevice(device); }
  void uncheckedSetDevice(c10::Device device) const noexcept override { current = index(device); }
  c10::Stream getStream(c10::Device device) const override { return stream(device, current_stream[index(device)]); }
  c10::Stream getDefaultStream(c10::Device device) const override { return stream(device, 0); }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override { return getNewStream(device, 0); }
  c10::Stream getNewStream(c10::Device device, int) const override { return stream(device, next_stream++); }
  c10::Stream exchangeStream(c10::Stream chosen) const override {
    auto before = getStream(chosen.device());
    current_stream[chosen.device_index()] = chosen.id();
    return before;
  }
  void record(void** pointer, const c10::Stream& on, c10::DeviceIndex, c10::EventFlag) const override {
    if (!*pointer) *pointer = new std::shared_ptr<Event>();
    *static_cast<std::shared_ptr<Event>*>(*pointer) = ::record(place(on));
  }
  void destroyEvent(void* pointer, c10::DeviceIndex) const noexcept override {
    delete static_cast<std::shared_ptr<Event>*>(pointer);
  }
  void block(void* pointer, const c10::Stream& on) const override { wait_for(place(on), event(pointer)); }
  bool queryEvent(void* pointer) const override {
    if (!pointer) return true;
    if (hangs) return false;
    auto& asked = event(pointer);
    if (++asked.queries > QUERIES_UNTIL_DONE) host_waited(asked);
    return is_done(asked.place, asked.number);
  }
  bool queryStream(const c10::Stream& asked) const override { return !hangs && is_done(place(asked), ALL); }
  static bool is_done(Place place, int64_t number) {
    Lock lock(streams_mutex);
    auto& queue = streams[place].queue;
    return queue.empty() || queue.front()->number > number;
  }
  void synchronizeStream(const c10::Stream& stream) const override {
    host_waits("synchronize stream");
    require_device();
    host_waited(*::record(place(stream)));
  }
  void synchronizeEvent(void* pointer) const override {
    host_waits("synchronize event");
    require_device();
    if (pointer) host_waited(event(pointer));
  }
  void synchronizeDevice(c10::DeviceIndex device) const override {
    host_waits("synchronize device");
    require_device();
    std::vector<Place> places;
    {
      Lock lock(streams_mutex);
      for (auto& [place, stream] : streams)
        if (place.first == (device < 0 ? current : device)) places.push_back(place);
    }
    for (auto& place : places) host_waited(*::record(place));
  }
  double elapsedTime(void*, void*, c10::DeviceIndex) const override { return 0; }
  c10::DeviceIndex deviceCount() const noexcept override { return num_devices; }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return num_devices; }
  void setCurrentDevice(c10::DeviceIndex device) const override { current = device; }
  c10::DeviceIndex getCurrentDevice() const override { return current; }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex device) const override { return std::exchange(current, device); }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex device) const override { return exchangeDevice(device); }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex) const override {
    return at::globalContext().defaultGenerator(c10::Device(c10::kCPU));
  }
  at::Device getDeviceFromPtr(void*) const override { return {NPU, current}; }
  bool isPinnedPtr(const void* pointer) const override {
    std::lock_guard<std::mutex> lock(memory_mutex);
    auto after = pinned.upper_bound(static_cast<const char*>(pointer));
    return after != pinned.begin() && (--after)->first + after->second > static_cast<const char*>(pointer);
  }
  c10::Allocator* getPinnedMemoryAllocator() const override { return &pinned_allocator; }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t size) const override {
    auto made = device_allocator.allocate(size);
    if (storage.data() && size) std::memcpy(made.get(), storage.data(), std::min(size, storage.nbytes()));
    storage.unsafeGetStorageImpl()->set_data_ptr_noswap(std::move(made));
    storage.unsafeGetStorageImpl()->set_nbytes(size);
  }
};

// ---- operators ------------------------------------------------------------------------------------------------------

struct OnDevice {  // the current device is this one inside
  c10::DeviceIndex before = current;
  explicit OnDevice(std::optional<at::Device> device) {
    if (device && device->index() >= 0) current = device->index();
    TORCH_CHECK(current < num_devices, "invalid device ordinal: npu:", int(current), " of ", num_devices);
  }
  ~OnDevice() { current = before; }
};

constexpr c10::DispatchKeySet KEYS(c10::DispatchKey::PrivateUse1);

static Tensor empty(at::IntArrayRef sizes, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                    std::optional<at::Device> device, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  OnDevice on(device);
  auto type = dtype.value_or(at::get_default_dtype_as_scalartype());
  return at::detail::empty_generic(sizes, &device_allocator, KEYS, type, format);
}

static Tensor empty_strided(at::IntArrayRef sizes, at::IntArrayRef strides, std::optional<at::ScalarType> dtype,
                            std::optional<at::Layout>, std::optional<at::Device> device, std::optional<bool>) {
  OnDevice on(device);
  auto type = dtype.value_or(at::get_default_dtype_as_scalartype());
  return at::detail::empty_strided_generic(sizes, strides, &device_allocator, KEYS, type);
}

// A result of a CPU kernel, in memory of the device.
static Tensor to_device(const Tensor& on_host, c10::Device device) {
  if (!on_host.defined() || !on_host.device().is_cpu()) return on_host;
  auto dense = on_host.is_non_overlapping_and_dense() ? on_host : on_host.contiguous();
  auto made = empty_strided(dense.sizes(), dense.strides(), dense.scalar_type(), {}, device, {});
  if (dense.numel()) std::memcpy(made.data_ptr(), dense.data_ptr(), dense.nbytes());
  return made;
}

// Says so if an operation on `place` touches memory that another stream writes, without having waited for it.
static bool found_race(Place place, const std::vector<Tensor>& tensors, const std::string& name) {
  bool found = false;
  {
    Lock lock(streams_mutex);
    for (auto& tensor : tensors) found = found || (tensor.is_privateuseone() && is_race(place, block_of(tensor)));
  }
  if (found) count("race in " + name);
  return found;
}

// Queues a copy on a stream; what it reads is looked at when the stream is flushed.
static void copy_late(Place place, const Tensor& from, const Tensor& to) {
  auto source = host_alias(from), target = host_alias(to);
  auto read = block_of(from), written = block_of(to);
  bool is_ordered;
  {
    Lock lock(streams_mutex);
    auto& queue = streams[place].queue;
    is_ordered = std::none_of(queue.begin(), queue.end(), [&](auto& i) { return i->before || i->source == written; });
  }
  // The destination is poisoned now: after what this stream waits for, and after its own reads.
  if (!is_ordered) flush(place, ALL);
  poison(target);
  push(place, {0, nullptr, [source, target] { target.copy_(source); }, read});
  Lock lock(streams_mutex);
  if (to.is_privateuseone()) mark_written(place, written);
}

static Tensor copy_from(const Tensor& from, const Tensor& to, bool non_blocking) {
  bool to_npu = to.is_privateuseone(), from_npu = from.is_privateuseone();
  auto place = here((to_npu ? to : from).device().index());
  require_device();
  if (from.numel() == 0) return to;
  bool is_pinned = block_of(to_npu ? from : to) != nullptr;
  bool waits = to_npu != from_npu && !(non_blocking && is_pinned);
  bool can_be_late = to_npu != from_npu ? !waits : place.second != 0;
  if (waits) host_waits(to_npu ? "blocking copy to device" : "copy to host");
  bool raced = found_race(place, {from, to}, "copy");
  if (!raced && can_be_late && is_late()) {
    copy_late(place, from, to);
    return to;
  }
  place = begin_kernel(place.first);
  if (raced) poison(host_alias(to));
  else host_alias(to).copy_(host_alias(from));
  Lock lock(streams_mutex);
  if (to_npu) mark_written(place, block_of(to));
  if (waits) merge(seen_by_host, record(place)->seen);
  return to;
}

static at::Scalar item(const Tensor& tensor) {
  host_waits("item");
  auto place = begin_kernel(tensor.device().index());
  auto value = host_alias(tensor);
  if (found_race(place, {tensor}, "item")) poison(value = value.clone());
  Lock lock(streams_mutex);
  merge(seen_by_host, record(place)->seen);
  return value.item();
}

static const Tensor& resize_npu(const Tensor& self, at::IntArrayRef sizes, std::optional<at::MemoryFormat>) {
  auto strides = c10::contiguous_strides(sizes);
  auto size = at::detail::computeStorageNbytes(sizes, strides, self.element_size(), self.storage_offset());
  if (size > self.storage().nbytes()) at::detail::getPrivateUse1Hooks().resizePrivateUse1Bytes(self.storage(), size);
  self.unsafeGetTensorImpl()->set_sizes_and_strides(sizes, strides);
  return self;
}

static Tensor& set(Tensor& self, at::Storage source, int64_t offset, at::IntArrayRef sizes, at::IntArrayRef strides) {
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(source));
  impl->set_storage_offset(offset);
  impl->set_sizes_and_strides(sizes, strides);
  return self;
}

static Tensor view(const Tensor& self, at::IntArrayRef sizes) { return at::native::view(self, sizes); }
static Tensor reshape_alias(const Tensor& self, at::IntArrayRef sizes, at::IntArrayRef strides) {
  return at::native::_reshape_alias(self, sizes, strides);
}
static Tensor as_strided(const Tensor& self, at::IntArrayRef sizes, at::IntArrayRef strides, std::optional<int64_t> o) {
  return at::native::as_strided_tensorimpl(self, sizes, strides, o);
}
static Tensor unfold(const Tensor& self, int64_t dim, int64_t size, int64_t step) {
  return at::native::unfold(self, dim, size, step);
}

// Whether tensors' attributes may be kept when their data are replaced, as torch_npu says (else Module.to drops them).
static bool has_compatible_type(const Tensor& one, const Tensor& other) {
  auto dense = [](const Tensor& t) { return t.key_set().has(c10::DispatchKey::CPU) || t.is_privateuseone(); };
  return one.key_set() == other.key_set() || (dense(one) && dense(other));
}

static const std::set<std::string> WAIT_FOR_A_SIZE = {
    "aten::nonzero", "aten::masked_select", "aten::equal", "aten::is_nonzero", "aten::bincount", "aten::_unique",
    "aten::_unique2", "aten::unique_consecutive", "aten::unique_dim", "aten::repeat_interleave"};
static const std::set<std::string> TAKE_HOST_INDICES = {
    "aten::index", "aten::index_put_", "aten::index_put", "aten::_index_put_impl_"};
// aclnnMatmul and its relatives take float16, bfloat16 and float32.
static const std::set<std::string> WITHOUT_FLOAT64 = {
    "aten::mm", "aten::bmm", "aten::addmm", "aten::baddbmm", "aten::addmv", "aten::mv", "aten::dot", "aten::convolution"};

struct Call {
  const c10::FunctionSchema& schema;
  std::string name;
  std::vector<at::IValue> given, on_host;
  std::vector<Tensor> tensors, read, hosts;
  std::optional<c10::Device> device;
  bool has_mask = false;

  Call(const c10::FunctionSchema& of, std::vector<at::IValue> arguments)
      : schema(of), name(of.name()), given(std::move(arguments)) {
    for (auto& value : given) on_host.push_back(moved(value));
  }

  Tensor looked_at(const Tensor& tensor) {
    if (!tensor.defined()) return tensor;
    (tensor.is_privateuseone() ? tensors : hosts).push_back(tensor);
    if (!tensor.is_privateuseone()) return tensor;
    TORCH_CHECK(!device || *device == tensor.device(), "Expected all tensors to be on the same device, but found ",
                *device, " and ", tensor.device(), " in ", name);
    device = tensor.device();
    return host_alias(tensor);
  }

  at::IValue moved(const at::IValue& value) {
    if (value.isTensor()) return looked_at(value.toTensor());
    if (value.isTensorList()) {
      std::vector<Tensor> made;
      for (const auto& tensor : value.toTensorVector()) made.push_back(looked_at(tensor));
      return made;
    }
    if (value.isOptionalTensorList()) {
      c10::List<std::optional<Tensor>> made;
      for (const auto& tensor : value.toOptionalTensorVector()) {
        has_mask |= tensor && (tensor->scalar_type() == at::kBool || tensor->scalar_type() == at::kByte);
        made.push_back(tensor ? std::optional<Tensor>(looked_at(*tensor)) : std::nullopt);
      }
      return made;
    }
    if (!value.isDevice()) return value;
    if (value.toDevice().is_privateuseone() && value.toDevice().has_index()) device = value.toDevice();
    return c10::Device(c10::kCPU);
  }

  void require_supported() {
    bool takes_host = TAKE_HOST_INDICES.count(name);
    for (auto& tensor : hosts) {
      TORCH_CHECK(tensor.dim() == 0 || takes_host, "Expected all tensors to be on the same device, but found ",
                  device->str(), " and ", tensor.device(), " in ", name);
      if (tensor.dim() && takes_host) host_waits("blocking copy to device");
    }
    for (auto& tensor : tensors)
      TORCH_CHECK(tensor.scalar_type() != at::kDouble || !WITHOUT_FLOAT64.count(name), name,
                  " is not implemented for DT_DOUBLE on NPU: expected DT_FLOAT, DT_FLOAT16 or DT_BFLOAT16");
    bool has_size = name == "aten::repeat_interleave" && !given.back().isNone();
    // With one value it is masked_fill, which needs no size.
    bool is_put = has_mask && name == "aten::_index_put_impl_" && (given[2].toTensor().numel() > 1 || given[3].toBool());
    if ((WAIT_FOR_A_SIZE.count(name) && !has_size) || is_put) host_waits(name);
  }

  // The argument that a result is written to, in place or as `out`; resized as the CPU's kernel did it.
  at::IValue written(const c10::AliasInfo& info) {
    for (size_t i = 0; i < given.size(); i++) {
      auto* own = schema.arguments()[i].alias_info();
      if (!own || !(*own == info)) continue;
      if (given[i].isTensor() && given[i].toTensor().is_privateuseone()) {
        auto target = given[i].toTensor(), made = on_host[i].toTensor();
        if (made.sizes() != target.sizes()) resize_npu(target, made.sizes(), std::nullopt);
        if (made.numel() && made.data_ptr() != target.data_ptr()) host_alias(target).copy_(made);
      }
      return given[i];
    }
    TORCH_CHECK(false, "no written argument for ", name);
  }
};

static void mark(Place place, const at::IValue& value, bool raced) {
  auto one = [&](const Tensor& tensor) {
    if (!tensor.defined() || !tensor.is_privateuseone()) return;
    if (raced && tensor.numel()) poison(host_alias(tensor));
    mark_written(place, block_of(tensor));
  };
  Lock lock(streams_mutex);
  if (value.isTensor()) one(value.toTensor());
  else if (value.isTensorList()) for (const auto& tensor : value.toTensorVector()) one(tensor);
}

// Every operator without a kernel of its own: the CPU's kernel on the same memory.
static void run_on_host(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  Call call(schema, torch::jit::pop(*stack, schema.arguments().size()));
  auto device = call.device.value_or(c10::Device(NPU, current));
  call.require_supported();
  auto place = begin_kernel(device.index());
  bool raced = found_race(place, call.tensors, call.name);
  for (auto& value : call.on_host) stack->push_back(value);
  op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
  for (auto& [value, info] : [&] {
         std::vector<std::pair<at::IValue, const c10::AliasInfo*>> made;
         auto values = torch::jit::pop(*stack, schema.returns().size());
         for (size_t i = 0; i < values.size(); i++) made.emplace_back(values[i], schema.returns()[i].alias_info());
         return made;
       }()) {
    TORCH_CHECK(!info || info->isWrite(), "emulated NPU: a view without a kernel of its own: ", call.name);
    at::IValue made = value;
    if (info) made = call.written(*info);
    else if (value.isTensor()) made = to_device(value.toTensor(), device);
    else if (value.isTensorList()) {
      std::vector<Tensor> all;
      for (const auto& tensor : value.toTensorVector()) all.push_back(to_device(tensor, device));
      made = all;
    }
    mark(place, made, raced);
    stack->push_back(made);
  }
}

// Kernels that torch has for CUDA alone, some of which it composes of others elsewhere.
static void refuse(const c10::OperatorHandle& op, torch::jit::Stack*) {
  TORCH_CHECK_NOT_IMPLEMENTED(false, op.schema().name(), " is not implemented for NPU");
}

// Integers are counted, too, which the CPU's kernel does not take.
static Tensor histc(const Tensor& self, int64_t bins, const at::Scalar& low, const at::Scalar& high) {
  auto place = begin_kernel(self.device().index());
  bool raced = found_race(place, {self}, "aten::histc");
  auto made = to_device(at::histc(host_alias(self).to(at::kFloat), bins, low, high).to(self.scalar_type()), self.device());
  mark(place, made, raced);
  return made;
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&run_on_host>()); }
TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("_copy_from", copy_from);
  m.impl("_local_scalar_dense", item);
  m.impl("resize_", resize_npu);
  m.impl("set_.source_Storage_storage_offset", set);
  m.impl("view", view);
  m.impl("as_strided", as_strided);
  m.impl("_reshape_alias", reshape_alias);
  m.impl("unfold", unfold);
  m.impl("histc", histc);
  m.impl("record_stream", [](Tensor&, c10::Stream) {});
  for (auto* name : {"_scaled_mm", "_scaled_grouped_mm", "_flash_attention_forward", "_cudnn_rnn",
                     "_flash_attention_backward", "_efficient_attention_forward",
                     "_scaled_dot_product_flash_attention", "_scaled_dot_product_cudnn_attention"})
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&refuse>());
}
struct Quiet final : c10::WarningHandler {  // torch warns that its own kernel is replaced
  c10::WarningHandler* before = c10::WarningUtils::get_warning_handler();
  Quiet() { c10::WarningUtils::set_warning_handler(this); }
  ~Quiet() override { c10::WarningUtils::set_warning_handler(before); }
  void process(const c10::Warning&) override {}
};
TORCH_LIBRARY_IMPL(aten, CatchAll, m) {
  Quiet quiet;
  m.impl("_has_compatible_shallow_copy_type", TORCH_FN(has_compatible_type));
}

// ---- hccl -----------------------------------------------------------------------------------------------------------

using c10d::Backend;
using c10d::Work;
using Tensors = std::vector<Tensor>;

// Work of hccl: `wait` makes the current stream wait, and returns at once.
struct HcclWork final : Work {
  c10::intrusive_ptr<Work> inner;  // null: it has failed
  std::shared_ptr<std::atomic<bool>> aborted;
  std::shared_ptr<Event> end;
  std::string failure;
  bool tells_its_end = false;
  std::mutex joining;
  bool is_joined = false;

  std::string problem() const {
    if (!failure.empty()) return failure;
    if (*aborted) return "HCCL communicator was aborted";
    return "";
  }
  bool isCompleted() override { return !problem().empty() || inner->isCompleted(); }
  bool isSuccess() const override { return problem().empty() && inner->isSuccess(); }
  std::exception_ptr exception() const override {
    auto said = problem();
    return said.empty() ? inner->exception() : std::make_exception_ptr(std::runtime_error(said));
  }
  bool wait(std::chrono::milliseconds) override {
    synchronize();
    return true;
  }
  void synchronize() override { wait_for(here(current), *end); }
  // For the stream: returns when the results are there. One thread waits for gloo, whose receives end only once.
  void join() {
    std::lock_guard<std::mutex> lock(joining);
    if (is_joined) return;
    // Most of gloo's work says that it has ended only to who waits for it.
    while (tells_its_end && problem().empty() && !inner->isCompleted()) std::this_thread::sleep_for(std::chrono::microseconds(50));
    TORCH_CHECK(problem().empty(), problem());
    inner->wait();
    is_joined = true;
  }
};

struct Hccl final : Backend {
  c10::intrusive_ptr<Backend> gloo;
  std::shared_ptr<std::atomic<bool>> aborted = std::make_shared<std::atomic<bool>>(false);
  std::atomic<bool> is_broken{false};
  int64_t group = next_group--;

  explicit Hccl(c10::intrusive_ptr<Backend> over) : Backend(over->getRank(), over->getSize()), gloo(std::move(over)) {}
  const std::string getBackendName() const override { return "hccl"; }
  void setSequenceNumberForGroup() override {}
  uint64_t getSequenceNumberForGroup() override { return 0; }

  static Tensors flat(const std::vector<Tensors>& lists) {
    Tensors all;
    for (auto& list : lists) all.insert(all.end(), list.begin(), list.end());
    return all;
  }

  // Starts a collective in gloo on copies of these tensors; `outputs` hold poison until the stream is flushed.
  template <typename Start>
  c10::intrusive_ptr<Work> start(const Tensors& inputs, const Tensors& outputs, Start run, bool tells_its_end = false) {
    for (auto& tensor : flat({inputs, outputs})) {
      TORCH_CHECK(tensor.is_privateuseone(), "hccl: No backend type associated with device type ", tensor.device().type());
      TORCH_CHECK(tensor.is_contiguous(), "hccl: Tensors must be contiguous");
    }
    TORCH_CHECK(!*aborted, "HCCL communicator was aborted");
    int device = (outputs.empty() ? inputs : outputs).at(0).device().index();
    auto compute = begin_kernel(device);
    Place place{device, group};
    found_race(compute, flat({inputs, outputs}), "hccl");
    Tensors ins, outs;
    for (auto& tensor : inputs) ins.push_back(host_alias(tensor).clone());
    for (auto& tensor : outputs) outs.push_back(host_alias(tensor).clone());
    auto work = c10::make_intrusive<HcclWork>();
    work->aborted = aborted;
    work->tells_its_end = tells_its_end;
    if (is_broken || strikes("link")) {
      is_broken = true;
      work->failure = "HCCL function error: HcclBroadcast, link error (emulated)";
    } else {
      at::AutoDispatchBelowADInplaceOrView guard;
      work->inner = run(ins, outs);
    }
    wait_for(place, *record(compute));
    for (auto& tensor : outputs) poison(host_alias(tensor));
    auto* held = work.get();
    push(place, {0, [work] { work->join(); },
                 [ins, outs, outputs] {
                   for (size_t i = 0; i < outs.size(); i++) host_alias(outputs[i]).copy_(outs[i]);
                 }});
    Lock lock(streams_mutex);
    for (auto& tensor : outputs) mark_written(place, block_of(tensor));
    held->end = record(place);
    return work;
  }

#define IN_PLACE(NAME, OPTIONS)                                                                    \
  c10::intrusive_ptr<Work> NAME(Tensors& tensors, const c10d::OPTIONS& options) override {         \
    return start({}, tensors, [&](Tensors&, Tensors& outs) { return gloo->NAME(outs, options); }, true); \
  }
  IN_PLACE(broadcast, BroadcastOptions)
  IN_PLACE(allreduce, AllreduceOptions)
  IN_PLACE(allreduce_coalesced, AllreduceCoalescedOptions)
  IN_PLACE(reduce, ReduceOptions)

#define TO_ONE(NAME, OPTIONS)                                                                                  \
  c10::intrusive_ptr<Work> NAME(Tensor& output, Tensor& input, const c10d::OPTIONS& options) override {        \
    return start({input}, {output}, [&](Tensors& ins, Tensors& outs) { return gloo->NAME(outs[0], ins[0], options); }); \
  }
  TO_ONE(_allgather_base, AllgatherOptions)
  TO_ONE(_reduce_scatter_base, ReduceScatterOptions)

#define TO_SEVERAL(NAME, OPTIONS)                                                                               \
  c10::intrusive_ptr<Work> NAME(Tensors& outputs, Tensors& inputs, const c10d::OPTIONS& options) override {     \
    return start(inputs, outputs, [&](Tensors& ins, Tensors& outs) { return gloo->NAME(outs, ins, options); }); \
  }
  TO_SEVERAL(allgather_into_tensor_coalesced, AllgatherOptions)
  TO_SEVERAL(reduce_scatter_tensor_coalesced, ReduceScatterOptions)
  TO_SEVERAL(alltoall, AllToAllOptions)

  static std::vector<Tensors> divided(const Tensors& all, const std::vector<Tensors>& like) {
    std::vector<Tensors> lists;
    auto next = all.begin();
    for (auto& list : like) {
      lists.emplace_back(next, next + list.size());
      next += list.size();
    }
    return lists;
  }
  c10::intrusive_ptr<Work> allgather(std::vector<Tensors>& outputs, Tensors& inputs,
                                     const c10d::AllgatherOptions& options) override {
    return start(inputs, flat(outputs), [&](Tensors& ins, Tensors& outs) {
      auto lists = divided(outs, outputs);
      return gloo->allgather(lists, ins, options);
    });
  }
  c10::intrusive_ptr<Work> gather(std::vector<Tensors>& outputs, Tensors& inputs,
                                  const c10d::GatherOptions& options) override {
    return start(inputs, flat(outputs), [&](Tensors& ins, Tensors& outs) {
      auto lists = divided(outs, outputs);
      return gloo->gather(lists, ins, options);
    });
  }
  c10::intrusive_ptr<Work> reduce_scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                                          const c10d::ReduceScatterOptions& options) override {
    return start(flat(inputs), outputs, [&](Tensors& ins, Tensors& outs) {
      auto lists = divided(ins, inputs);
      return gloo->reduce_scatter(outs, lists, options);
    });
  }
  c10::intrusive_ptr<Work> alltoall_base(Tensor& output, Tensor& input, std::vector<int64_t>& to,
                                         std::vector<int64_t>& from, const c10d::AllToAllOptions& options) override {
    return start({input}, {output}, [&](Tensors& ins, Tensors& outs) {
      return gloo->alltoall_base(outs[0], ins[0], to, from, options);
    });
  }
  c10::intrusive_ptr<Work> send(Tensors& tensors, int rank, int tag) override {
    return start(tensors, {}, [&](Tensors& ins, Tensors&) { return gloo->send(ins, rank, tag); });
  }
  c10::intrusive_ptr<Work> recv(Tensors& tensors, int rank, int tag) override {
    return start({}, tensors, [&](Tensors&, Tensors& outs) { return gloo->recv(outs, rank, tag); });
  }
  c10::intrusive_ptr<Work> barrier(const c10d::BarrierOptions& options) override { return gloo->barrier(options); }
  void shutdown() override { gloo->shutdown(); }
  // Ends this member's work at once. The others notice by their own time limits: the connections stay.
  void abort() override {
    if (!aborted->exchange(true)) new c10::intrusive_ptr<Backend>(gloo);
  }
};

// ---- Python ---------------------------------------------------------------------------------------------------------

static void init(int devices, size_t bytes, const std::string& late, const std::map<std::string, int64_t>& faults,
                 py::object waits, py::object strike) {
  num_devices = devices;
  capacity = bytes;
  late_mode = late == "never" ? Late::NEVER : late == "always" ? Late::ALWAYS : Late::SEEDED;
  late_seed = late_mode == Late::SEEDED ? std::stoull(late) : 0;
  num_copies = 0;
  num_until_fault = faults;
  *on_wait = std::move(waits);
  *on_fault = std::move(strike);
  static auto* hooks = new Hooks();
  static bool is_first = true;
  if (std::exchange(is_first, false)) at::RegisterPrivateUse1HooksInterface(hooks);
}

static std::map<std::string, size_t> memory(int device) {
  std::lock_guard<std::mutex> lock(memory_mutex);
  auto& used = usage[device];
  return {{"allocated", used.allocated}, {"peak", used.peak}, {"reserved", used.reserved}, {"capacity", capacity},
          {"others", of_others(device)}};
}

static void forget_peak(int device, bool frees) {
  std::lock_guard<std::mutex> lock(memory_mutex);
  (frees ? usage[device].reserved : usage[device].peak) = usage[device].allocated;
}

// For operators that Python computes: the device's memory as a tensor of the host, after its stream's late work.
static Tensor host_view(const Tensor& tensor) {
  auto place = begin_kernel(tensor.device().index());
  bool raced = found_race(place, {tensor}, "a fused operator");
  auto made = host_alias(tensor.detach());
  if (raced) poison(made = made.clone());
  return made;
}

// Makes the memory of a tensor that of the file, which takes its values if it is new.
static void share(const Tensor& tensor, int file, bool is_new) {
  host_view(tensor);
  auto block = block_of(tensor);
  TORCH_CHECK(block && block->data == tensor.data_ptr() && block->size >= PAGES, "only whole large storages are shared");
  if (is_new) TORCH_CHECK(ftruncate(file, block->size) == 0 && write(file, block->data, block->size) == ssize_t(block->size));
  map_pages(block->size, block->data, file);
}

static Tensor adopt(const Tensor& on_host, int device) {
  auto made = to_device(on_host.detach(), c10::Device(NPU, c10::DeviceIndex(device)));
  mark(here(device), made, false);
  return made;
}

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  using NoGil = py::call_guard<py::gil_scoped_release>;
  m.def("init", init);
  m.def("set_device", [](int device) { OnDevice(c10::Device(NPU, c10::DeviceIndex(device))); current = device; });
  m.def("current_device", [] { return int(current); });
  m.def("device_count", [] { return num_devices; });
  m.def("memory", memory);
  m.def("share_usage", share_usage);
  m.def("forget_peak", forget_peak);
  m.def("host_view", host_view, NoGil());
  m.def("adopt", adopt, NoGil());
  m.def("share", share, NoGil());
  m.def("hccl", [](c10::intrusive_ptr<Backend> gloo) -> c10::intrusive_ptr<Backend> { return c10::make_intrusive<Hccl>(gloo); });
}
