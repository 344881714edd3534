//! A hook in lookups where the writer may change what the reader is reading. Tests use it to run the
//! writer at exactly that moment; elsewhere it is nothing.

#[cfg(not(test))]
#[inline(always)]
pub(super) fn race_point() {}

#[cfg(test)]
thread_local! {
    /// What happens at this thread's race points.
    pub(super) static AT_RACE_POINT: std::cell::RefCell<Option<Box<dyn FnMut()>>> =
        const { std::cell::RefCell::new(None) };
}

#[cfg(test)]
pub(super) fn race_point() {
    if let Some(mut run) = AT_RACE_POINT.take() {
        run();
        AT_RACE_POINT.set(Some(run));
    }
    thread_local! {
        static PASSED: std::cell::Cell<u32> = const { std::cell::Cell::new(0) };
    }
    let passed = PASSED.get().wrapping_add(1);
    PASSED.set(passed);
    // Now and then, give a writer on another thread time to come between.
    if passed.is_multiple_of(11) {
        std::thread::yield_now();
        (0..300).for_each(|_| std::hint::spin_loop());
    }
}
