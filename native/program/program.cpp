#include "headrace/program.h"

#include <executorch/extension/data_loader/buffer_data_loader.h>

#include <algorithm>
#include <optional>
#include <unordered_map>

#include "program/aoti_payload.h"
#include "program/engine.h"
#include "program/exit.h"
#include "program/log.h"
#include "program/method.h"
#include "program/text.h"
#include "program/xnnpack.h"

namespace headrace {

namespace et = executorch::runtime;

ProgramCore::ProgramCore() { program_begins(); }
ProgramCore::~ProgramCore() { program_ends(); }

namespace {

std::string layout_text(const std::vector<int32_t>& sizes, DType dtype) {
  std::string out = dtype_name(dtype) + "[";
  for (size_t i = 0; i < sizes.size(); ++i) out += (i ? ", " : "") + std::to_string(sizes[i]);
  return out + "]";
}

// Every tensor that lives in a data file must be there, with the layout that the program was built for.
Status check_external_data(const ProgramCore& core) {
  std::string missing, mismatched;
  for (const MethodPlan& method : core.plan.methods) {
    for (const ValuePlan& value : method.values) {
      if (value.tensor < 0) continue;
      const TensorPlan& t = method.tensors[static_cast<size_t>(value.tensor)];
      bool external = t.storage == Storage::kExternal;
      if (!external) continue;
      const DataEntry* entry = core.data_map.find(t.name);
      if (entry == nullptr) {
        missing += (missing.empty() ? "'" : ", '") + t.name + "'";
      } else if (!entry->is_tensor || entry->dtype != t.dtype || entry->sizes != t.sizes ||
                 entry->dim_order != t.dim_order) {
        mismatched += (mismatched.empty() ? "'" : "; '") + t.name + "': expected " +
                      layout_text(t.sizes, t.dtype) + ", got " +
                      (entry->is_tensor ? layout_text(entry->sizes, entry->dtype) : "bytes without a shape");
      }
    }
  }
  const std::string& name = core.file->name();
  if (!missing.empty()) {
    return Status(ErrorCode::kProgram,
                  name + ": expected data files with the keys " + missing + ", got " +
                      std::to_string(core.data.size()) +
                      " files without them; pass the .ptd files that were exported with it as data=");
  }
  if (!mismatched.empty()) {
    return Status(ErrorCode::kProgram,
                  name +
                      ": expected the data that it was exported with, got data files of another program: " +
                      mismatched + "; pass the .ptd files that were exported with it as data=");
  }
  return {};
}

// Gives the program its device, and refuses what no device can do.
Status check_device(ProgramCore& core) {
  const std::string& name = core.file->name();
  bool wanted = false;
  for (const MethodPlan& method : core.plan.methods) {
    if (!uses_device(method)) continue;
    wanted = true;
    if (Status status = check_placement(method, name + ", method '" + method.name + "'"); !status.ok())
      return status;
  }
  if (core.device == nullptr && wanted) {
    // Never a simulated one: it would give answers where a GPU was meant.
    auto gpu = cuda_device(0);
    if (!gpu.ok()) {
      Status status(gpu.status().code(),
                    name + ", which needs a device for its memory: " + gpu.status().message());
      status->device = "cuda:0";
      return status;
    }
    core.device = *gpu;
  }
  if (core.device == nullptr) core.device = cpu_device();
  return {};
}

// The payloads whose format is known are compared with the calls and the data that they name.
Status check_payloads(const ProgramCore& core) {
  // The engine looks in the program first, then in the data files; either must do.
  std::unordered_map<std::string_view, std::string_view> named;
  for (const NamedBlob& blob : core.plan.named_data) {
    auto [at, fresh] = named.emplace(blob.key, blob.bytes);
    if (!fresh && blob.bytes.size() < at->second.size()) at->second = blob.bytes;
  }
  auto find = [&](std::string_view key) -> std::optional<std::string_view> {
    auto at = named.find(key);
    const DataEntry* entry = core.data_map.find(key);
    if (entry != nullptr && (at == named.end() || entry->bytes.size() < at->second.size()))
      return entry->bytes;
    return at == named.end() ? std::nullopt : std::optional(at->second);
  };
  for (const MethodPlan& method : core.plan.methods) {
    for (size_t i = 0; i < method.delegates.size(); ++i) {
      const DelegatePlan& delegate = method.delegates[i];
      std::string wrong;
      if (delegate.id == kXnnpack) wrong = check_xnnpack(method, i, find);
      if (delegate.id == kCudaBackend) wrong = check_aoti_payload(delegate.payload, method.name, find);
      if (!wrong.empty()) {
        return Status(ErrorCode::kProgram, core.file->name() + ", method '" + method.name +
                                               "', payload of delegate " + std::to_string(i) + " ('" +
                                               method.delegates[i].id + "'): " + wrong);
      }
    }
  }
  return {};
}

Status check_delegates_and_kernels(const ProgramCore& core, const LoadOptions& options) {
  const std::string& name = core.file->name();
  for (const MethodPlan& method : core.plan.methods) {
    std::string where = name + ", method '" + method.name + "'";
    for (const DelegatePlan& d : method.delegates) {
      if (!options.allow_native_code && payload_is_code(d.id)) {
        Status status(
            ErrorCode::kDelegateUnavailable,
            where + ": expected no native code (allow_native_code=False), got a payload for '" + d.id +
                "', which runs as code in this process; load it only if you trust where it comes from");
        status->delegate = d.id;
        return status;
      }
      if (Status status = check_delegate(d.id, where); !status.ok()) return status;
    }
    std::string missing;
    for (const std::string& op : method.operators) {
      if (!kernel_registered(op)) missing += (missing.empty() ? "'" : ", '") + op + "'";
    }
    if (!missing.empty()) {
      Status status(
          ErrorCode::kDelegateUnavailable,
          where + ": expected kernels for " + missing +
              ", got none; load the library that holds them, or let a delegate take these operators");
      status->method = method.name;
      return status;
    }
  }
  for (const auto& [delegate, entries] : options.options) {
    bool used = std::any_of(core.plan.methods.begin(), core.plan.methods.end(), [&](const MethodPlan& m) {
      return std::any_of(m.delegates.begin(), m.delegates.end(),
                         [&](const DelegatePlan& d) { return d.id == delegate; });
    });
    if (!used) {
      return Status(ErrorCode::kOption,
                    name + ", options: expected names of delegates that the program uses, got '" + delegate +
                        "'; leave it out, or correct the name");
    }
    for (const auto& [key, value] : entries) {
      const auto* text = std::get_if<std::string>(&value);
      if (key.empty() || key.size() > 63 || (text != nullptr && text->size() > 255)) {
        return Status(
            ErrorCode::kOption,
            name + ", options of '" + delegate +
                "': expected a key of 1 to 63 bytes and a text of at most 255, got '" + key +
                (text != nullptr ? "' with a text of " + std::to_string(text->size()) + " bytes" : "'") +
                "; give a shorter one");
      }
    }
  }
  return {};
}

}  // namespace

namespace {

// Reads and checks every file of the program that `core` names.
Status read_files(ProgramCore& core) {
  auto plan = read_program({core.file->data(), core.file->size(), core.file->name()});
  if (!plan.ok()) return plan.status();
  core.plan = std::move(*plan);
  for (const auto& data : core.data) {
    auto entries = read_data_file({data->data(), data->size(), data->name()});
    if (!entries.ok()) return entries.status();
    if (Status status = core.data_map.add(data->name(), std::move(*entries)); !status.ok()) return status;
  }
  if (Status status = check_external_data(core); !status.ok()) return status;
  return check_payloads(core);
}

}  // namespace

Status Program::verify(std::shared_ptr<const Bytes> file, std::vector<std::shared_ptr<const Bytes>> data) {
  ProgramCore core;
  core.file = std::move(file);
  core.data = std::move(data);
  return read_files(core);
}

Result<std::shared_ptr<Program>> Program::load(std::shared_ptr<const Bytes> file, LoadOptions options) {
  if (options.instances < 1 || options.instances > 1024) {
    return Status(ErrorCode::kOption, "instances: expected a count between 1 and 1024, got " +
                                          std::to_string(options.instances) +
                                          "; pass 1 for one call at a time");
  }
  if (Status status = initialize(); !status.ok()) return status;
  if (Status status = check_one_selection(); !status.ok()) return status;
  if (Status status = check_not_torn("load"); !status.ok()) return status;
  arm_exit_gate();
  if (options.max_steps < 1) {
    return Status(ErrorCode::kOption, "max_steps: expected a count of at least 1, got " +
                                          std::to_string(options.max_steps) +
                                          "; pass as many instructions as a call may take");
  }
  auto core = std::make_shared<ProgramCore>();
  core->file = std::move(file);
  core->data = options.data;
  core->options = options.options;
  core->device = options.device;
  core->max_steps = options.max_steps;

  core->loader =
      std::make_unique<executorch::extension::BufferDataLoader>(core->file->data(), core->file->size());
  if (Status status = read_files(*core); !status.ok()) return status;
  {
    LogScope log;
    auto program = et::Program::load(core->loader.get(), et::Program::Verification::InternalConsistency);
    if (!program.ok()) {
      Status status(ErrorCode::kProgram, core->file->name() +
                                             ": expected a program that is consistent in itself, got " +
                                             et::to_string(program.error()) + "; " + kDamaged);
      status->log = log.take();
      return status;
    }
    core->program.emplace(std::move(*program));
  }
  if (Status status = check_delegates_and_kernels(*core, options); !status.ok()) return status;
  if (Status status = check_device(*core); !status.ok()) return status;
  if (options.lane != nullptr) {
    const auto& methods = core->plan.methods;
    if (std::none_of(methods.begin(), methods.end(), uses_device))
      return Status(ErrorCode::kOption, core->file->name() +
                                            ", lane: expected a program with work for a device, got one that "
                                            "runs on the host; load it without a lane");
    auto lane = Lane::open(core->device, options.lane);
    if (!lane.ok()) return lane.status();
    core->lane = std::move(*lane);
  }

  std::shared_ptr<Program> self(new Program());
  self->core_ = core;
  for (const MethodPlan& method : core->plan.methods) {
    auto pool = MethodPool::load(core, method, options.instances);
    if (!pool.ok()) return pool.status();
    self->pools_.push_back(std::move(*pool));
  }
  return self;
}

Program::~Program() = default;

std::shared_ptr<ProgramCore> Program::core() const {
  std::lock_guard lock(mutex_);
  return core_;
}

std::vector<std::string> Program::method_names() const {
  std::vector<std::string> names;
  for (const auto& pool : pools_) names.push_back(pool->name());
  return names;
}

std::shared_ptr<Method> Program::method(const std::string& name) const {
  for (const auto& pool : pools_) {
    if (pool->name() == name) return std::make_shared<Method>(pool);
  }
  return nullptr;
}

std::vector<MemoryUse> Program::memory() const {
  std::vector<MemoryUse> out;
  std::shared_ptr<ProgramCore> core = this->core();
  if (core == nullptr) return out;
  out.push_back({"program", "", -1, "cpu", core->file->size()});
  for (const auto& data : core->data) out.push_back({"data", "", -1, "cpu", data->size()});
  for (const auto& pool : pools_) pool->memory(out);
  return out;
}

Status Program::close() {
  // Nothing is closed, or everything.
  for (const auto& pool : pools_) {
    if (Status status = pool->check_close(); !status.ok()) return status;
  }
  Status failed;
  for (const auto& pool : pools_) {
    Status status = pool->close();
    failed = failed.ok() ? status : also(failed, status);
  }
  std::shared_ptr<ProgramCore> core;
  std::lock_guard lock(mutex_);
  core.swap(core_);
  return failed;
}

}  // namespace headrace
