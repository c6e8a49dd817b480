// Options of the sanitizers, built into the programs of the presets asan and tsan.
// LibTorch and MPI are not instrumented: a container that they fill looks overrun (detect_container_overflow), and their
// locks are invisible (ignore_noninstrumented_modules). MPI and Python-style caches never free at exit (detect_leaks).

extern "C" {
const char* __asan_default_options();
const char* __ubsan_default_options();
const char* __tsan_default_options();

const char* __asan_default_options() {
  return "detect_container_overflow=0:detect_leaks=0:detect_odr_violation=0:protect_shadow_gap=0";
}
const char* __ubsan_default_options() { return "print_stacktrace=1:halt_on_error=1"; }
const char* __tsan_default_options() { return "ignore_noninstrumented_modules=1:second_deadlock_stack=1"; }
}
