// Graphs from C++, with native delegates that take part in them: `test_graphs SCENARIO PROGRAM`, where
// PROGRAM is `chain10` of tests/programs/committed: ten islands in turn of TestA and TestB, float32[4, 16] on
// the device. They are ours here: each adds how often it ran so far, a number that it keeps on the device.
// Exit status 0: as expected.
#include <executorch/runtime/backend/interface.h>

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <string>
#include <vector>

#include "headrace/capture.h"
#include "headrace/device_guard.h"
#include "headrace/program.h"

#include "check.h"

namespace et = executorch::runtime;
using headrace::CaptureStage;
using headrace::ErrorCode;
using headrace::Value;

namespace {

constexpr int kNumel = 4;
std::atomic<int> runs[3], pins{0};  // by stage; pins that live
std::string no;                     // why TestB cannot be captured
bool takes_part = true;
int fails_in = -1;  // the stage in which TestB fails

class Counting : public headrace::IslandCapture {
 public:
  Counting(headrace::DeviceRef device, std::string name) : device(std::move(device)), name(std::move(name)) {
    auto memory = this->device->allocate(sizeof(float), headrace::kPerThreadStream);
    CHECK(memory.ok());
    total = static_cast<float*>(*memory);
    CHECK(this->device->fill(total, 0, sizeof(float), headrace::kPerThreadStream).ok());
    CHECK(this->device->synchronize(headrace::kPerThreadStream).ok());
  }
  ~Counting() override { (void)device->free(total, headrace::kPerThreadStream); }

  std::string refusal() override { return name == "TestB" ? no : ""; }
  std::vector<headrace::Access> state() override { return {{total, sizeof(float), true}}; }
  std::shared_ptr<void> pin() override {
    ++pins;
    return {this, [](void*) { --pins; }};
  }

  headrace::DeviceRef device;
  std::string name;
  float* total = nullptr;
};

class Backend final : public et::BackendInterface {
 public:
  explicit Backend(std::string name) : name_(std::move(name)) {}
  bool is_available() const override { return true; }

  et::Result<et::DelegateHandle*> init(et::BackendInitContext&, et::FreeableBuffer* payload,
                                       et::ArrayRef<et::CompileSpec>) const override {
    auto part = std::make_shared<Counting>(headrace::DeviceGuard::current()->device(), name_);
    if (takes_part) CHECK(headrace::take_part(name_, payload->data(), part));
    CHECK(!headrace::take_part(name_, this, part));
    return reinterpret_cast<et::DelegateHandle*>(new std::shared_ptr<Counting>(part));
  }

  et::Error execute(et::BackendExecutionContext&, et::DelegateHandle* handle,
                    et::Span<et::EValue*> args) const override {
    int stage = static_cast<int>(headrace::capture_stage());
    ++runs[stage];
    if (name_ == "TestB" && stage == fails_in) return et::Error::Internal;
    auto part = *reinterpret_cast<std::shared_ptr<Counting>*>(handle);
    const auto* x = args[0]->toTensor().const_data_ptr<float>();
    auto* y = args[1]->toTensor().mutable_data_ptr<float>();
    auto work = [x, y, total = part->total] {
      *total += 1;
      for (int i = 0; i < kNumel; ++i) y[i] = x[i] + *total;
      return headrace::Status();
    };
    headrace::Status status = part->device->call(headrace::DeviceGuard::current()->stream(), work,
                                                 {{x, 4 * kNumel, false}, {y, 4 * kNumel, true}});
    return status.ok() ? et::Error::Ok : et::Error::Internal;
  }

  void destroy(et::DelegateHandle* handle) const override {
    delete reinterpret_cast<std::shared_ptr<Counting>*>(handle);
  }

 private:
  const std::string name_;
};

struct Scene {
  explicit Scene(const std::string& path, headrace::SimOptions::Schedule schedule) {
    headrace::SimOptions options;
    options.schedule = schedule;
    device = headrace::make_sim_device(options);
    auto file = headrace::Bytes::read(path);
    CHECK(file.ok());
    headrace::LoadOptions load;
    load.device = device;
    auto loaded = headrace::Program::load(*file, load);
    if (!loaded.ok()) std::fprintf(stderr, "%s\n", loaded.status().message().c_str());
    CHECK(loaded.ok());
    program = *loaded;
    method = program->method("forward");
    stream = *device->create_stream({});
    for (auto& n : runs) n = 0;
  }
  static Value tensor(std::vector<float>& data) {
    Value value;
    value.kind = Value::Kind::kTensor;
    value.tensor.data = data.data();
    value.tensor.ndim = 2;
    value.tensor.sizes = {1, 4};
    value.tensor.strides_bytes = {16, 4};
    return value;
  }
  // Every element is `x` plus what the ten islands add in their `step`-th run, from 1.
  void right(const std::vector<Value>& outputs, float x, int step) {
    CHECK(outputs.size() == 1 && outputs[0].device == device);
    CHECK(outputs[0].block->wait(false).ok());
    std::vector<float> host(kNumel);
    CHECK(device->copy(host.data(), outputs[0].tensor.data, 4 * kNumel, stream).ok());
    CHECK(device->synchronize(stream).ok());
    for (float value : host) CHECK(value == x + 10.0f * static_cast<float>(step));
  }
  std::vector<Value> inputs(float x) {
    data.assign(kNumel, x);
    return {tensor(data)};
  }

  std::shared_ptr<headrace::SimDevice> device;
  std::shared_ptr<headrace::Program> program;
  std::shared_ptr<headrace::Method> method;
  headrace::StreamHandle stream = 0;
  std::vector<float> data;
};

void steps(const std::string& path, headrace::SimOptions::Schedule schedule) {
  Scene scene(path, schedule);
  headrace::CaptureOptions capture;
  capture.stream = scene.stream;
  std::vector<Value> outputs;
  auto graph = scene.method->capture(scene.inputs(3), capture, outputs);
  if (!graph.ok()) std::fprintf(stderr, "%s\n", graph.status().message().c_str());
  CHECK(graph.ok());
  CHECK(runs[0] == 0 && runs[1] == 10 && runs[2] == 10 && pins == 10);
  scene.right(outputs, 3, 1);
  headrace::ReplayOptions replay;
  replay.stream = scene.stream;
  for (int step = 2; step < 6; ++step) {
    auto x = static_cast<float>(step);
    CHECK((*graph)->replay(scene.inputs(x), {}, replay, outputs).ok());
    CHECK(runs[0] == 0 && runs[1] == 10 && runs[2] == 10);
    scene.right(outputs, x, step);
  }
  headrace::CallOptions call;
  call.stream = scene.stream;
  CHECK(scene.method->run(scene.inputs(9), {}, call, outputs).ok());
  scene.right(outputs, 9, 6);
  CHECK(runs[0] == 10);
  // What launches in flight use is kept until they are done.
  CHECK((*graph)->replay(scene.inputs(1), {}, replay, outputs).ok());
  CHECK((*graph)->close().ok());
  scene.right(outputs, 1, 7);
  CHECK((*graph)->replay(scene.inputs(1), {}, replay, outputs).code() == ErrorCode::kCapture);
  CHECK(scene.program->close().ok());
  CHECK(pins == 0);
}

void replays(const std::string& path) {
  for (auto schedule : {headrace::SimOptions::Schedule::kEager, headrace::SimOptions::Schedule::kLate,
                        headrace::SimOptions::Schedule::kRandom})
    steps(path, schedule);
}

void refused(const std::string& path, const char* words) {
  Scene scene(path, headrace::SimOptions::Schedule::kLate);
  std::vector<Value> outputs;
  auto graph = scene.method->capture(scene.inputs(1), {}, outputs);
  headrace::Status status = graph.status();
  CHECK(status.code() == ErrorCode::kCapture && status->step == "check");
  if (status.message().find(words) == std::string::npos)
    std::fprintf(stderr, "%s\n", status.message().c_str());
  CHECK(status.message().find(words) != std::string::npos);
  CHECK(runs[0] == 0 && runs[1] == 0 && runs[2] == 0);
  CHECK(scene.method->run(scene.inputs(2), {}, {}, outputs).ok());
  scene.right(outputs, 2, 1);
}

void refusals(const std::string& path) {
  no = "it captures by itself";
  refused(path, "delegate 'TestB', which cannot: it captures by itself");
  no.clear();
  takes_part = false;
  refused(path, "it says nothing about graphs");
}

// The engine carries a code; state is put back.
void failures(const std::string& path) {
  for (int stage = 1; stage < 3; ++stage) {
    Scene scene(path, headrace::SimOptions::Schedule::kLate);
    std::vector<Value> outputs;
    fails_in = stage;
    headrace::Status status = scene.method->capture(scene.inputs(1), {}, outputs).status();
    CHECK(status.code() == ErrorCode::kCapture && status->step == (stage == 1 ? "warm-up" : "record"));
    CHECK(outputs.empty());
    fails_in = -1;
    for (int step = 1; step < 4; ++step) {
      CHECK(scene.method->run(scene.inputs(5), {}, {}, outputs).ok());
      scene.right(outputs, 5, step);
    }
  }
}

}  // namespace

int main(int argc, char** argv) {
  CHECK(argc == 3);
  CHECK(headrace::initialize().ok());
  static Backend a("TestA"), b("TestB");
  CHECK(et::register_backend({"TestA", &a}) == et::Error::Ok);
  CHECK(et::register_backend({"TestB", &b}) == et::Error::Ok);
  const std::string scenario = argv[1], path = argv[2];
  const std::pair<const char*, void (*)(const std::string&)> all[] = {
      {"replays", replays}, {"refusals", refusals}, {"failures", failures}};
  for (const auto& [name, run] : all) {
    if (scenario != name) continue;
    run(path);
    return 0;
  }
  std::fprintf(stderr, "no scenario '%s'\n", argv[1]);
  return 2;
}
