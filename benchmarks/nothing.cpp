// A native delegate that does nothing, under the names that the chains of tests/programs/committed call.
#include <executorch/runtime/backend/interface.h>

namespace et = executorch::runtime;

namespace {

int executed = 0;

class Nothing final : public et::BackendInterface {
 public:
  bool is_available() const override { return true; }
  et::Result<et::DelegateHandle*> init(et::BackendInitContext&, et::FreeableBuffer*,
                                       et::ArrayRef<et::CompileSpec>) const override {
    return nullptr;
  }
  et::Error execute(et::BackendExecutionContext&, et::DelegateHandle*, et::Span<et::EValue*>) const override {
    ++executed;
    return et::Error::Ok;
  }
};

Nothing nothing;

}  // namespace

extern "C" __attribute__((visibility("default"))) int nothing_register() {
  for (const char* name : {"TestA", "TestB"}) {
    if (et::register_backend({name, &nothing}) != et::Error::Ok) return 1;
  }
  return 0;
}

extern "C" __attribute__((visibility("default"))) int nothing_executed() { return executed; }
