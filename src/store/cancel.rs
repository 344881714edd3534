//! Notices: how an owner learns that a response which it runs was cancelled or deleted through another replica.

use std::collections::VecDeque;

use super::keys::ResponseKey;
use crate::observe::metrics::words;

/// Notices kept for an owner, which polls many times a second. An owner that falls further behind learns of the
/// rest from `check_ownership`.
pub(super) const NOTICES_MAX: usize = 1_000;

/// A response that its owner need not run any longer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Notice {
    pub key: ResponseKey,
    pub kind: NoticeKind,
    /// When it was cancelled or deleted, in Unix milliseconds of the store's clock.
    pub at_ms: u64,
}

words! {
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub enum NoticeKind {
        Cancelled = "cancelled",
        Deleted = "deleted",
    }
}

/// How far an owner has read its notices. Meaningful only to the store that returned it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct NoticeCursor(pub u64, pub u64);

/// The queue of one owner's notices; the oldest are dropped when it is full.
#[derive(Clone, Debug, Default)]
pub struct Notices {
    kept: VecDeque<Notice>,
    dropped: u64,
}

impl Notices {
    pub fn push(&mut self, notice: Notice) {
        if self.kept.len() == NOTICES_MAX {
            self.kept.pop_front();
            self.dropped += 1;
        }
        self.kept.push_back(notice);
    }

    pub fn after(&self, cursor: NoticeCursor) -> (Vec<Notice>, NoticeCursor) {
        let from = cursor.0.saturating_sub(self.dropped) as usize;
        let notices = self.kept.iter().skip(from).copied().collect();
        let end = self.dropped + self.kept.len() as u64;
        (notices, NoticeCursor(end, 0))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ids::{ResponseId, Root, Tenant};

    fn notice(own: u128) -> Notice {
        Notice {
            key: ResponseKey {
                tenant: Tenant::tagged(1),
                id: ResponseId::new(Root(1), own),
            },
            kind: NoticeKind::Cancelled,
            at_ms: 7,
        }
    }

    #[test]
    fn each_notice_is_read_once_and_the_oldest_make_way() {
        let mut notices = Notices::default();
        notices.push(notice(0));
        let (read, cursor) = notices.after(NoticeCursor::default());
        assert_eq!(read, [notice(0)]);
        assert_eq!(notices.after(cursor), (Vec::new(), cursor));
        for own in 1..=NOTICES_MAX as u128 {
            notices.push(notice(own));
        }
        let (read, _) = notices.after(NoticeCursor::default());
        assert_eq!((read.len(), read[0]), (NOTICES_MAX, notice(1)));
        let (read, _) = notices.after(cursor);
        assert_eq!((read.len(), read[0]), (NOTICES_MAX, notice(1)));
    }
}
