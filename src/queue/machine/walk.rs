//! Who of those that wait is looked at, and who passes them: one walk over the queue. Pure.

use std::time::{Duration, Instant};

use super::{Left, Queue};
use crate::queue::next::Next;
use crate::queue::types::{Look, Outcome, Room, Stretch, Timing};

/// So many waiting requests are looked at each time, in their order: each asks what is known of the caches.
pub(super) const LOOKED_AT_MAX: usize = 32;
/// So many more are passed over each time, because they are known to wait for a worker that is full, or that is left to
/// another replica's request: they do not keep those behind them from others. Each costs a small part of a look. Then,
/// at most every `BEHIND_EVERY`, so many again of those behind them.
pub const PASSED_OVER_MAX: usize = 512;
const BEHIND_EVERY: Duration = Duration::from_millis(10);

/// So many waiting requests are looked at each time, in their order, whatever is known of them. Behind these, who was
/// seen to wait for a worker that is still full, or in a line that lets another replica's request go first, is passed
/// over.
pub const LOOKED_AT_IN_ORDER: usize = 16;
/// For how long one of the first 512 is passed over. Within this time the looks of each 10 ms come around at them.
pub const PASSED_OVER_FOR: Duration = Duration::from_secs(1);

impl<T> Queue<T> {
    /// Looks at the requests in their order, releases those that `look` sends, and refuses those whose time is over.
    /// `look` gets the request's times. `computed` counts the prompt tokens that the workers have computed so far. Of
    /// many requests the first ones are looked at each time. The walk over those behind them goes on where it stopped,
    /// and begins anew when it has come to the end.
    pub fn advance(
        &mut self,
        now: Instant,
        room: Room,
        computed: u64,
        mut look: impl FnMut(&T, Timing, Stretch) -> Look,
    ) -> Vec<Left<T>> {
        self.set_room(now, room);
        let is_busy = room.is_full && !self.is_empty();
        self.rate.update(now, computed, &room, is_busy);
        self.is_all_looked_at = false;
        let mut left = Vec::new();
        self.expire(now, &mut left);
        if room.is_full && !room.others_have_room || room.workers == 0 {
            return left;
        }
        let mut next = Next::new(&self.classes, &self.floors);
        let mut stretch = Stretch::First;
        let (mut waiting, mut passed_over) = (0, 0);
        let (mut is_end, mut is_full) = (false, false);
        while waiting < LOOKED_AT_MAX {
            if passed_over == PASSED_OVER_MAX {
                let is_soon = |at: Instant| now.saturating_duration_since(at) < BEHIND_EVERY;
                if stretch != Stretch::First || self.walked_behind.is_some_and(is_soon) {
                    break;
                }
                self.walked_behind = Some(now);
                passed_over = 0;
                stretch = Stretch::Behind;
                if let Some(behind) = self.behind.take() {
                    next = behind;
                    stretch = Stretch::Resumed;
                }
            }
            let Some((id, class, cost)) = next.peek() else {
                is_end = true;
                break;
            };
            let Some(entry) = self.entries.get(&id) else {
                // It has left since the walk began.
                passed_over += 1;
                next.advance(&self.classes, class, cost);
                continue;
            };
            let timing = Timing {
                time_left: entry.time_left(now),
                wait_left: entry.expires.saturating_duration_since(now),
                due: self.due_in(class, &entry.place),
            };
            let outcome = match look(&entry.waker, timing, stretch) {
                Look::Send => Some(Outcome::Released),
                Look::TooLate(first_token) => Some(self.too_late(now, entry, first_token)),
                Look::Wait => {
                    waiting += 1;
                    None
                }
                Look::PassOver => {
                    passed_over += 1;
                    None
                }
                Look::Full => {
                    is_full = true;
                    break;
                }
            };
            next.advance(&self.classes, class, cost);
            if let Some(outcome) = outcome
                && let Some(entry) = self.remove(id, outcome == Outcome::Released)
            {
                left.push(self.left(entry, now, outcome));
            }
        }
        self.is_all_looked_at = is_end && stretch != Stretch::Resumed;
        if is_end || stretch != Stretch::First {
            // If none of those behind can have anything now, those before them may, once there is room.
            self.behind = (!is_end && !is_full).then_some(next);
        }
        left
    }
}
