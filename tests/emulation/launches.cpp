// Launches in streams, their CTAs, and the functions that Python calls.

#include <algorithm>
#include <csetjmp>
#include <csignal>
#include <cstring>
#include <link.h>
#include <map>

#include "machine.hpp"

namespace emu {

std::vector<uint32_t> fences_of;

namespace {
std::vector<Kernel> &kernels() {
  static std::vector<Kernel> all;
  return all;
}
std::vector<std::vector<Running *>> streams;  // what is left of each
std::vector<Running *> all_launches;
sigjmp_buf escape;

void start_cta(Running *running) {
  Cta *cta = new Cta;
  const Launch &l = running->launch;
  cta->launch = running;
  cta->number = running->started++;
  cta->threads = cta->alive = l.block;
  cta->dynamic.assign(l.shared, 0xff);  // NaN as bf16
  cta->warps = std::vector<Warp>(l.block / 32);
  running->ctas.push_back(cta);
  const uint32_t base = random_below(1u << 30);
  for (uint32_t i = 0; i < cta->warps.size(); ++i) {
    Warp &w = cta->warps[i];
    w.cta = cta, w.index = w.role = i, w.core.warp = &w, w.core.role = PRODUCTS;
    w.priority = 1 + base / 2 + random_below(1u << 29);
    for (uint32_t lane = 0; lane < 32; ++lane) {
      Fiber *f = new Fiber;
      f->warp = &w, f->lane = lane, f->thread = i * 32 + lane;
      f->number = (uint32_t)fences_of.size();
      fences_of.push_back(1);
      f->where = {{f->thread, 0, 0},
                  {cta->number % l.grid_x, cta->number / l.grid_x, 0},
                  {l.grid_x, l.grid_y, 1}};
      w.lanes[lane] = f;
      cta->fibers.push_back(f);
    }
  }
  for (Fiber *f : cta->fibers) start_fiber(f);
}

int find_tls(dl_phdr_info *info, size_t, void *data) {
  auto *found = (std::pair<uint8_t *, size_t> *)data;
  const auto *variable = found->first;
  for (int i = 0; i < info->dlpi_phnum; ++i) {
    const auto &header = info->dlpi_phdr[i];
    auto *base = (uint8_t *)info->dlpi_tls_data;
    if (header.p_type != PT_TLS || !base || variable < base || variable >= base + header.p_memsz)
      continue;
    *found = {base, header.p_memsz};
    return 1;
  }
  return 0;
}

void on_signal(int number) { siglongjmp(escape, number); }

void clean_up() {
  for (Running *running : all_launches) {
    for (Cta *cta : running->ctas) {
      for (Fiber *f : cta->fibers) {
        take_back_stack(f);
        for (CopyGroup *group : f->groups) delete group;
        delete f->open;
        delete f;
      }
      for (Copy *copy : cta->copies) delete copy;
      delete cta;
    }
    delete running;
  }
  all_launches.clear();
  streams.clear();
  forget_copies();
  fences_of.clear();
}
}  // namespace

void add_kernel(const char *name, void (*run)(const Launch &), void *(*shared_variable)(),
                const void *dynamic) {
  kernels().push_back({name, run, shared_variable, dynamic});
}

std::pair<uint8_t *, size_t> shared_block(void *variable) {
  static std::map<void *, std::pair<uint8_t *, size_t>> known;
  const auto found = known.find(variable);
  if (found != known.end()) return found->second;
  std::pair<uint8_t *, size_t> block = {(uint8_t *)variable, 0};
  if (!dl_iterate_phdr(find_tls, &block)) fail("the block of static shared memory was not found");
  return known[variable] = block;
}

// A launch begins when the one before in its stream is over, copies included.
bool start_ctas() {
  bool more = false;
  for (auto &stream : streams) {
    while (!stream.empty()) {
      const Running &first = *stream.front();
      if (first.finished < first.launch.grid_x * first.launch.grid_y || first.copies) break;
      stream.erase(stream.begin());
      progress();
    }
    if (stream.empty()) continue;
    more = true;
    Running *running = stream.front();
    const uint32_t all = running->launch.grid_x * running->launch.grid_y;
    while (running->started < all &&
           running->started - running->finished < running->launch.resident) {
      start_cta(running);
      if (random_below(4) == 0) break;
    }
  }
  return more;
}

void finish_cta(Cta *cta) {
  check_copies_done(cta);
  for (const Warp &w : cta->warps)
    if (!w.core.queue.empty()) fail("a CTA ends before its products");
  for (const Fiber *f : cta->fibers) ++fences_of[f->number];  // a launch's end is a fence
  cta->dynamic = {};
  ++cta->launch->finished;
  progress();
}

std::string describe_waits() {
  std::string text;
  int lines = 0;
  for (Running *running : all_launches)
    for (Cta *cta : running->ctas)
      for (Warp &w : cta->warps) {
        std::map<std::string, uint32_t> lanes;
        for (Fiber *f : w.lanes) {
          if (!f || f->done) continue;
          char line[256];
          const char *what = f->waits_for ? f->waits_for : "nothing";
          if (f->waits_for && f->waits_for[0] == 'a')
            snprintf(line, sizeof line, "%s (%s = %u)", what, describe(f->waits_at).c_str(),
                     *(const uint32_t *)f->waits_at);
          else if (f->waits_for && f->waits_for[0] == 'm')
            snprintf(line, sizeof line, "%s at %llu, parity %u", what,
                     (unsigned long long)f->waits_at, f->wanted);
          else snprintf(line, sizeof line, "%s", what);
          lanes[line] |= 1u << f->lane;
        }
        for (const auto &[line, mask] : lanes) {
          if (++lines > 60) return text + "...\n";
          char head[96];
          snprintf(head, sizeof head, "%s CTA %u warp %u lanes %08x: ",
                   running->kernel->name.c_str(), cta->number, w.index, mask);
          text += head + line + "\n";
        }
      }
  return text;
}

}  // namespace emu

using namespace emu;

// The number of the kernel of this name that was announced last, or -1.
extern "C" int emulator_kernel(const char *name) {
  for (size_t i = kernels().size(); i-- > 0;)
    if (kernels()[i].name == name) return (int)i;
  return -1;
}

// Runs launches to their end; 0, or 1 with what went wrong in `report`.
extern "C" int emulator_run(const Launch *launches, uint32_t count, const char *const *names,
                            const uint64_t *extents, uint32_t regions, uint64_t seed,
                            int let_time_pass, uint64_t most_steps, char *report, uint32_t size) {
  set_regions(names, extents, regions);
  for (uint32_t i = 0; i < count; ++i) {
    Running *running = new Running;
    running->launch = launches[i];
    running->kernel = &kernels()[launches[i].kernel];
    all_launches.push_back(running);
    if (streams.size() <= launches[i].stream) streams.resize(launches[i].stream + 1);
    streams[launches[i].stream].push_back(running);
  }
  static char signal_stack[64 * 1024];
  stack_t alternative{}, before_stack{};
  alternative.ss_sp = signal_stack, alternative.ss_size = sizeof signal_stack;
  sigaltstack(&alternative, &before_stack);
  struct sigaction action{}, before[3];
  action.sa_handler = on_signal, action.sa_flags = SA_ONSTACK | SA_NODEFER;
  const int signals[3] = {SIGSEGV, SIGBUS, SIGFPE};
  for (int i = 0; i < 3; ++i) sigaction(signals[i], &action, &before[i]);
  std::string failure;
  if (const int number = sigsetjmp(escape, 1)) {
    failure = std::string("a thread of a kernel was ended by ") + strsignal(number);
    emu::current = nullptr;
    make_current_cta(nullptr);
  } else {
    failure = run_to_end(seed, let_time_pass != 0, most_steps);
  }
  for (int i = 0; i < 3; ++i) sigaction(signals[i], &before[i], nullptr);
  sigaltstack(&before_stack, nullptr);
  clean_up();
  snprintf(report, size, "%s", failure.c_str());
  return failure.empty() ? 0 : 1;
}
