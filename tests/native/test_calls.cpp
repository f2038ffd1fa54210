// Calls of methods from C++, with a delegate that sees what overlaps: `test_calls SCENARIO PROGRAM`.
// The programs are those of tests/programs; `not_there` calls a delegate "NotThere", which is ours here and
// multiplies float32[8, 16] by float32[16, 8]. Exit status 0: as expected.
#include <executorch/runtime/backend/interface.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <mutex>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "headrace/program.h"

#include "check.h"

namespace et = executorch::runtime;
using headrace::ErrorCode;
using headrace::Value;

namespace {

std::atomic<int> inside{0}, most_inside{0}, made{0}, destroyed{0};
std::function<et::Error()> during = [] { return et::Error::Ok; };
bool available = true;
et::Error at_init = et::Error::Ok;

class NotThere final : public et::BackendInterface {
 public:
  bool is_available() const override { return available; }

  et::Result<et::DelegateHandle*> init(et::BackendInitContext&, et::FreeableBuffer*,
                                       et::ArrayRef<et::CompileSpec>) const override {
    if (at_init != et::Error::Ok) {
      ET_LOG(Error, "this payload is not for me");
      return at_init;
    }
    ++made;
    return reinterpret_cast<et::DelegateHandle*>(new int(0));
  }

  et::Error execute(et::BackendExecutionContext&, et::DelegateHandle*,
                    et::Span<et::EValue*> args) const override {
    int now = ++inside;
    int most = most_inside;
    while (now > most && !most_inside.compare_exchange_weak(most, now)) {
    }
    et::Error error = during();
    if (error == et::Error::Ok) {
      const auto* x = args[0]->toTensor().const_data_ptr<float>();
      const auto* y = args[1]->toTensor().const_data_ptr<float>();
      auto* z = args[2]->toTensor().mutable_data_ptr<float>();
      for (int i = 0; i < 8; ++i) {
        for (int j = 0; j < 8; ++j) {
          float sum = 0;
          for (int k = 0; k < 16; ++k) sum += x[16 * i + k] * y[8 * k + j];
          z[8 * i + j] = sum;
        }
      }
    }
    --inside;
    return error;
  }

  void destroy(et::DelegateHandle* handle) const override {
    ++destroyed;
    delete reinterpret_cast<int*>(handle);
  }
};

NotThere delegate;

template <size_t N>
Value tensor(std::vector<float>& data, const int64_t (&sizes)[N]) {
  Value value;
  value.kind = Value::Kind::kTensor;
  value.tensor.data = data.data();
  value.tensor.ndim = N;
  int64_t step = sizeof(float);
  for (size_t d = N; d-- > 0;) {
    value.tensor.sizes[d] = sizes[d];
    value.tensor.strides_bytes[d] = step;
    step *= sizes[d];
  }
  return value;
}

std::shared_ptr<headrace::Program> load(const std::string& path, int instances = 1) {
  auto file = headrace::Bytes::read(path);
  CHECK(file.ok());
  headrace::LoadOptions options;
  options.instances = instances;
  auto program = headrace::Program::load(*file, options);
  if (!program.ok()) std::fprintf(stderr, "%s\n", program.status().message().c_str());
  CHECK(program.ok());
  return *program;
}

// One call of `not_there`: sigmoid(x @ y + 1) * 2 with every x of `a` and every y of 1/16.
headrace::Status multiply(headrace::Method& method, float a) {
  std::vector<float> x(8 * 16, a), y(16 * 8, 1.0f / 16);
  std::vector<Value> outputs;
  headrace::Status status =
      method.run(std::vector<Value>{tensor(x, {8, 16}), tensor(y, {16, 8})}, {}, {}, outputs);
  if (!status.ok()) return status;
  CHECK(outputs.size() == 1);
  const auto* z = static_cast<const float*>(outputs[0].tensor.data);
  float want = 2.0f / (1.0f + std::exp(-(a + 1.0f)));
  for (int i = 0; i < 64; ++i) CHECK(std::abs(z[i] - want) < 1e-5f);
  return status;
}

void in_threads(int count, const std::function<void(int)>& work) {
  std::vector<std::thread> threads;
  for (int k = 0; k < count; ++k) threads.emplace_back(work, k);
  for (auto& thread : threads) thread.join();
}

// With one instance no two calls are inside the delegate at a time, and every caller gets its own answer.
void turns(const std::string& path) {
  auto program = load(path);
  auto method = program->method("forward");
  during = [] {
    std::this_thread::yield();
    return et::Error::Ok;
  };
  in_threads(8, [&](int k) {
    for (int i = 0; i < 500; ++i) CHECK(multiply(*method, 0.01f * static_cast<float>(k + i % 7)).ok());
  });
  CHECK(most_inside == 1);
}

// With two, two calls are inside together: each waits for the other there.
void overlap(const std::string& path) {
  auto program = load(path, 2);
  auto method = program->method("forward");
  std::mutex mutex;
  std::condition_variable changed;
  int arrived = 0;
  during = [&] {
    std::unique_lock lock(mutex);
    ++arrived;
    changed.notify_all();
    bool both = changed.wait_for(lock, std::chrono::seconds(60), [&] { return arrived >= 2; });
    return both ? et::Error::Ok : et::Error::Internal;
  };
  in_threads(2, [&](int k) { CHECK(multiply(*method, static_cast<float>(k)).ok()); });
  CHECK(most_inside == 2);
  // A third call would have to wait: there are no more than two.
  during = [] {
    std::this_thread::yield();
    return et::Error::Ok;
  };
  in_threads(8, [&](int k) {
    for (int i = 0; i < 300; ++i) CHECK(multiply(*method, 0.1f * static_cast<float>(k)).ok());
  });
  CHECK(most_inside == 2);
}

// A call, or a close, from inside a running call of the same method is refused, not waited for.
void reentry(const std::string& path) {
  auto program = load(path);
  auto method = program->method("forward");
  headrace::Status call, close;
  during = [&] {
    call = multiply(*method, 1.0f);
    close = program->close();
    return et::Error::Ok;
  };
  CHECK(multiply(*method, 2.0f).ok());
  CHECK(call.code() == ErrorCode::kInput);
  CHECK_HAS(call.message(), "forward: expected a call from outside, got one from inside a running call");
  CHECK(close.code() == ErrorCode::kInput);
  CHECK_HAS(close.message(), "expected close() from outside, got it from inside a running call");
  during = [] { return et::Error::Ok; };
  CHECK(multiply(*method, 3.0f).ok());
}

// A delegate that fails is named, with its own log lines and nobody else's, and the next call is right.
void failure(const std::string& path) {
  auto program = load(path, 4);
  auto method = program->method("forward");
  thread_local int me = -1;
  during = [] {
    if (me < 0) return et::Error::Ok;
    ET_LOG(Error, "thread %d has no luck", me);
    return et::Error::InvalidState;
  };
  in_threads(4, [&](int k) {
    for (int i = 0; i < 200; ++i) {
      me = k;
      headrace::Status status = multiply(*method, 1.0f);
      me = -1;
      CHECK(status.code() == ErrorCode::kDelegate);
      CHECK(status->delegate == "NotThere");
      CHECK(status->method == "forward");
      CHECK(status->island == 0);
      CHECK_HAS(status.message(), "forward, instruction 0, delegate 'NotThere': running failed: ");
      CHECK(status->log.size() >= 1);
      CHECK_HAS(status->log[0], ("thread " + std::to_string(k) + " has no luck").c_str());
      CHECK(multiply(*method, 0.5f).ok());
    }
  });
}

// A native delegate that throws ends its call alone: the turn is given back, for this thread and others, and
// the program can be closed.
void thrown(const std::string& path) {
  auto program = load(path);
  auto method = program->method("forward");
  for (int k = 0; k < 3; ++k) {
    during = []() -> et::Error {
      --inside;
      throw std::runtime_error("on purpose");
    };
    headrace::Status status = multiply(*method, 1.0f);
    CHECK(status.code() == ErrorCode::kDelegate);
    CHECK(status->method == "forward");
    CHECK(!status->log.empty());
    CHECK_HAS(status->log.back(), "a delegate or kernel threw a C++ exception: on purpose");
    during = [] { return et::Error::Ok; };
    CHECK(multiply(*method, 0.5f).ok());
    in_threads(2, [&](int) { CHECK(multiply(*method, 2.0f).ok()); });
  }
  CHECK(program->close().ok());
}

// What a delegate says while it is loaded reaches the caller.
void refusal(const std::string& path) {
  auto file = headrace::Bytes::read(path);
  at_init = et::Error::InvalidArgument;
  auto refused = headrace::Program::load(*file, {});
  CHECK(refused.status().code() == ErrorCode::kDelegate);
  CHECK(refused.status()->delegate == "NotThere");
  CHECK_HAS(refused.status()->log.at(0), "this payload is not for me");
  at_init = et::Error::Ok;
  available = false;
  auto absent = headrace::Program::load(*file, {});
  CHECK(absent.status().code() == ErrorCode::kDelegateUnavailable);
  CHECK_HAS(absent.status().message(), "expected the delegate 'NotThere', got one that is not available");
  available = true;
  CHECK(headrace::Program::load(*file, {}).ok());
}

// A view that is wrong in itself is told before anybody looks at it; inputs and `out` alike.
void views(const std::string& path) {
  auto program = load(path);
  auto method = program->method(program->method_names().at(0));
  std::vector<float> x(8 * 16, 1.0f), y(16 * 8, 1.0f), z(8 * 8, 0.0f);
  std::vector<Value> outputs;
  auto with = [&](const std::function<void(headrace::TensorView&)>& wrong, bool of_out) {
    std::vector<Value> inputs{tensor(x, {8, 16}), tensor(y, {16, 8})}, out{tensor(z, {8, 8})};
    wrong(of_out ? out[0].tensor : inputs[0].tensor);
    headrace::Status status = method->run(inputs, out, {}, outputs);
    CHECK(status.code() == ErrorCode::kInput);
    CHECK_HAS(status.message(), of_out ? "out 0" : "input 0");
    return status.message();
  };
  for (bool of_out : {false, true}) {
    CHECK_HAS(with([](auto& view) { view.data = nullptr; }, of_out), "no memory: its data is null");
    CHECK_HAS(with([](auto& view) { view.sizes[1] = -8; }, of_out), "a size of -8 in dimension 1");
    CHECK_HAS(with([](auto& view) { view.ndim = 99; }, of_out), "a rank of 99, where 0 to 16 is possible");
    CHECK_HAS(with([](auto& view) { view.ndim = -1; }, of_out), "a rank of -1");
  }
  CHECK(multiply(*method, 1.0f).ok());
}

// Each instance's handle is made once and destroyed once, after its last call.
void handles(const std::string& path) {
  {
    auto program = load(path, 3);
    CHECK(made == 3 && destroyed == 0);
    auto method = program->method("forward");
    std::atomic<bool> entered{false}, closed{false};
    during = [&] {
      entered = true;
      std::this_thread::sleep_for(std::chrono::milliseconds(50));
      CHECK(destroyed == 0 && !closed);
      return et::Error::Ok;
    };
    std::thread caller([&] { CHECK(multiply(*method, 1.0f).ok()); });
    while (!entered) std::this_thread::yield();
    CHECK(program->close().ok());
    closed = true;
    CHECK(destroyed == 3);
    caller.join();
    headrace::Status late = multiply(*method, 1.0f);
    CHECK(late.code() == ErrorCode::kProgram);
    CHECK_HAS(late.message(), "forward: expected an open program, got one that was closed");
    CHECK(program->close().ok());
  }
  during = [] { return et::Error::Ok; };
  {
    // A method keeps what it needs when its program is dropped.
    auto method = load(path)->method("forward");
    CHECK(multiply(*method, 1.0f).ok());
    CHECK(destroyed == 3);
  }
  CHECK(made == 4 && destroyed == 4);
}

// Two methods of one program, each called by threads of its own.
void methods(const std::string& path) {
  auto program = load(path);
  CHECK(program->method_names().size() == 2);
  auto scale = program->method("scale"), compare = program->method("compare");
  CHECK(scale != nullptr && compare != nullptr && program->method("forward") == nullptr);
  in_threads(8, [&](int k) {
    for (int i = 0; i < 2000; ++i) {
      auto a = static_cast<float>(i % 100 + k);
      std::vector<Value> outputs;
      if (k % 2 == 0) {
        std::vector<float> x(6, a);
        CHECK(scale->run(std::vector<Value>{tensor(x, {2, 3})}, {}, {}, outputs).ok());
        const auto* y = static_cast<const float*>(outputs[0].tensor.data);
        for (int n = 0; n < 6; ++n) CHECK(y[n] == 3.0f * a);
      } else {
        std::vector<float> x(4, a), y(4, 2.0f);
        CHECK(compare->run(std::vector<Value>{tensor(x, {4}), tensor(y, {4})}, {}, {}, outputs).ok());
        CHECK(*static_cast<const float*>(outputs[0].tensor.data) == 8.0f * a);
        const auto* d = static_cast<const float*>(outputs[1].tensor.data);
        for (int n = 0; n < 4; ++n) CHECK(d[n] == a - 2.0f);
      }
    }
  });
}

// The process ends while threads are in calls and a program lives in a global.
std::shared_ptr<headrace::Program> global;

void ending(const std::string& path) {
  // Exit handlers run in reverse: this one after the library's, which waits for the calls.
  std::atexit([] { CHECK(inside == 0); });
  global = load(path, 2);
  during = [] {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
    return et::Error::Ok;
  };
  for (int k = 0; k < 4; ++k) {
    std::thread([] {
      auto method = global->method("forward");
      for (;;) (void)multiply(*method, 1.0f);
    }).detach();
  }
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
}

}  // namespace

int main(int argc, char** argv) {
  CHECK(argc == 3);
  CHECK(headrace::initialize().ok());
  CHECK(et::register_backend({"NotThere", &delegate}) == et::Error::Ok);
  const std::string scenario = argv[1], path = argv[2];
  const std::pair<const char*, void (*)(const std::string&)> all[] = {
      {"turns", turns},   {"overlap", overlap}, {"reentry", reentry}, {"failure", failure},
      {"thrown", thrown}, {"refusal", refusal}, {"handles", handles}, {"methods", methods},
      {"ending", ending}, {"views", views}};
  for (const auto& [name, run] : all) {
    if (scenario != name) continue;
    run(path);
    return 0;
  }
  std::fprintf(stderr, "no scenario '%s'\n", argv[1]);
  return 2;
}
