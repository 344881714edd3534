//! Settings of the whole process: environment variables, the memory allocator and the limit of file descriptors.
//! `main` applies them first.

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

/// Must be called before any other thread starts.
pub fn prepare() {
    limit_tokenizer_threads();
    keep_freed_memory();
    raise_descriptor_limit();
}

/// Shells and service managers start processes with a soft limit of 1,024 file descriptors and a hard limit of hundreds
/// of thousands. The soft limit is there for programs that use `select`; this one does not.
fn raise_descriptor_limit() {
    let limit = getrlimit(Resource::Nofile);
    let raised = Rlimit {
        current: limit.maximum,
        maximum: limit.maximum,
    };
    // Should that be refused, the soft limit counts, and the start says what it is too low for.
    let _ = setrlimit(Resource::Nofile, raised);
}

/// For long texts the tokenizer library starts one thread per core, each with 100 MB of caches, unless this
/// variable says otherwise. The router has its own threads for long prompts.
fn limit_tokenizer_threads() {
    const THREADS: &str = "FASTOKENS_BPE_THREADS";
    if std::env::var_os(THREADS).is_some() {
        return;
    }
    #[expect(
        unsafe_code,
        clippy::disallowed_methods,
        reason = "no other thread runs yet that could read the environment"
    )]
    // SAFETY: this is called first in main, before any other thread exists.
    unsafe {
        std::env::set_var(THREADS, "1");
    }
}

/// A long prompt needs megabytes of memory for a millisecond. By default glibc returns them to the system at
/// once and gets them again for the next prompt, page by page: with a conversation of 400 KB that took half
/// of the time. Values that an operator set in the environment are kept.
#[cfg(all(target_os = "linux", target_env = "gnu"))]
fn keep_freed_memory() {
    /// Larger allocations are mapped one by one and returned when they are freed. Usual prompts are smaller.
    const MAPPED_FROM_BYTES: libc::c_int = 8 << 20;
    /// Free memory that each thread's heap keeps.
    const KEPT_BYTES: libc::c_int = 16 << 20;
    let settings = [
        (
            "MALLOC_MMAP_THRESHOLD_",
            libc::M_MMAP_THRESHOLD,
            MAPPED_FROM_BYTES,
        ),
        ("MALLOC_TRIM_THRESHOLD_", libc::M_TRIM_THRESHOLD, KEPT_BYTES),
    ];
    for (name, parameter, value) in settings {
        if std::env::var_os(name).is_some() {
            continue;
        }
        #[expect(unsafe_code, reason = "there is no safe wrapper of mallopt")]
        // SAFETY: mallopt takes two numbers and ignores parameters that it does not know.
        unsafe {
            libc::mallopt(parameter, value);
        }
    }
}

/// Only glibc has these parameters.
#[cfg(not(all(target_os = "linux", target_env = "gnu")))]
fn keep_freed_memory() {}

/// Gives free memory in the middle of the heaps back to the system. Takes the locks of the heaps for a few milliseconds
/// for each 100 MB.
#[cfg(all(target_os = "linux", target_env = "gnu"))]
pub(super) fn return_free_memory() {
    /// Left at the end of the main heap for the next allocations.
    const KEPT_BYTES: libc::size_t = 1 << 20;
    #[expect(unsafe_code, reason = "there is no safe wrapper of malloc_trim")]
    // SAFETY: malloc_trim takes a number, and may be called at any time by any thread.
    unsafe {
        libc::malloc_trim(KEPT_BYTES);
    }
}

/// Other allocators do this by themselves, or not at all.
#[cfg(not(all(target_os = "linux", target_env = "gnu")))]
pub(super) fn return_free_memory() {}
