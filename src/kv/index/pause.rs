//! Where a reader may be overtaken. Tests let it be: it waits now and then while the writer goes on,
//! or the writer goes on right here.

/// Nothing, but in tests.
#[cfg(not(test))]
#[inline(always)]
pub(super) fn pause() {}

#[cfg(test)]
thread_local! {
    /// What happens where this thread's readers pause.
    pub(super) static AT_PAUSE: std::cell::RefCell<Option<Box<dyn FnMut()>>> =
        const { std::cell::RefCell::new(None) };
}

#[cfg(test)]
pub(super) fn pause() {
    if let Some(mut at_pause) = AT_PAUSE.take() {
        at_pause();
        AT_PAUSE.set(Some(at_pause));
    }
    thread_local! {
        static PASSED: std::cell::Cell<u32> = const { std::cell::Cell::new(0) };
    }
    let passed = PASSED.get().wrapping_add(1);
    PASSED.set(passed);
    if passed.is_multiple_of(11) {
        std::thread::yield_now();
        (0..300).for_each(|_| std::hint::spin_loop());
    }
}
