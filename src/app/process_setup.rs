//! What is set once for the whole process, as `main`'s first act.

/// Sets what libraries read from the process rather than from us.
pub fn prepare() {
    keep_tokenizer_on_its_thread();
    keep_freed_memory();
}

/// The tokenizer's library starts a thread a core for texts that it cannot cut, each with caches of
/// 100 MB, and reads only here that it should not: prompts have threads of their own already.
fn keep_tokenizer_on_its_thread() {
    const THREADS: &str = "FASTOKENS_BPE_THREADS";
    if std::env::var_os(THREADS).is_some() {
        return;
    }
    #[expect(
        unsafe_code,
        clippy::disallowed_methods,
        reason = "nothing else runs yet that could read the environment"
    )]
    // SAFETY: main's first act; there is no other thread.
    unsafe {
        std::env::set_var(THREADS, "1");
    }
}

/// A long prompt takes megabytes for a millisecond. By default glibc gives them back at once and takes
/// them anew for the next one, page by page: of a conversation of 400 KB that was half the time.
/// What an operator has set stays.
#[cfg(all(target_os = "linux", target_env = "gnu"))]
fn keep_freed_memory() {
    /// Longer ones are mapped and given back on their own: no usual prompt is so long.
    const MAPPED_FROM_BYTES: libc::c_int = 8 << 20;
    /// Of each thread's heap; what is free beyond it is given back.
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
        #[expect(unsafe_code, reason = "there is no safe way to say it")]
        // SAFETY: it takes two numbers, and refuses those that it does not know.
        unsafe {
            libc::mallopt(parameter, value);
        }
    }
}

/// Other allocators have their own ways.
#[cfg(not(all(target_os = "linux", target_env = "gnu")))]
fn keep_freed_memory() {}
