//! Says whether anything has happened to a connection since it was driven, and wakes the task that waits for it.

use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::{AcqRel, Acquire, Release};
use std::task::{Wake, Waker};

use parking_lot::Mutex;

/// The waker with which a connection is driven. It rings before the first time, too.
#[derive(Debug)]
pub(super) struct Alarm {
    has_rung: AtomicBool,
    /// The task that waits. `None` once it was woken.
    task: Mutex<Option<Waker>>,
}

impl Default for Alarm {
    fn default() -> Self {
        Self {
            has_rung: AtomicBool::new(true),
            task: Mutex::default(),
        }
    }
}

impl Alarm {
    /// Whether it has rung since it was last asked.
    pub(super) fn take(&self) -> bool {
        self.has_rung.swap(false, AcqRel)
    }

    /// Has the connection driven the next time, whoever polls it. Wakes nobody.
    pub(super) fn ring(&self) {
        self.has_rung.store(true, Release);
    }

    /// Wakes a task when it rings, or now if it has rung meanwhile.
    pub(super) fn wakes(&self, task: &Waker) {
        let mut waiting = self.task.lock();
        let is_other = |waiting: &Waker| !waiting.will_wake(task);
        if waiting.as_ref().is_none_or(is_other) {
            *waiting = Some(task.clone());
        }
        // An alarm that finds no task has rung before this.
        if self.has_rung.load(Acquire) {
            *waiting = None;
            task.wake_by_ref();
        }
    }
}

impl Wake for Alarm {
    fn wake(self: Arc<Self>) {
        self.wake_by_ref();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        self.ring();
        let task = self.task.lock().take();
        if let Some(task) = task {
            task.wake();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicUsize;
    use std::sync::atomic::Ordering::Relaxed;

    use super::*;

    #[derive(Default)]
    struct Task(AtomicUsize);

    impl Wake for Task {
        fn wake(self: Arc<Self>) {
            self.0.fetch_add(1, Relaxed);
        }
    }

    #[test]
    fn it_rings_before_the_first_time_and_wakes_a_task_once() {
        let (alarm, task) = (Arc::new(Alarm::default()), Arc::new(Task::default()));
        let (rings, waker) = (Waker::from(alarm.clone()), Waker::from(task.clone()));
        let woken = || task.0.swap(0, Relaxed);
        assert!(alarm.take());
        assert!(!alarm.take());
        alarm.wakes(&waker);
        rings.wake_by_ref();
        rings.wake_by_ref();
        assert_eq!(woken(), 1);
        // It has rung before the task waits.
        alarm.wakes(&waker);
        assert_eq!(woken(), 1);
        assert!(alarm.take());
        // Nobody waits.
        rings.wake_by_ref();
        assert_eq!(woken(), 0);
        assert!(alarm.take());
    }

    #[test]
    fn of_two_tasks_the_one_that_waited_last_is_woken() {
        let alarm = Arc::new(Alarm::default());
        let tasks = [Arc::new(Task::default()), Arc::new(Task::default())];
        assert!(alarm.take());
        for task in &tasks {
            alarm.wakes(&Waker::from(task.clone()));
        }
        Waker::from(alarm).wake();
        assert_eq!(tasks.map(|task| task.0.load(Relaxed)), [0, 1]);
    }
}
