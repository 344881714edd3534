//! The cancellation bus: what owners are told of the responses that they run.

use std::collections::VecDeque;

use super::ResponseKey;

/// Notices kept for an owner. It reads them many times a second; whoever falls so far behind finds
/// out by asking for each response.
pub(super) const NOTICES_MAX: usize = 1_000;

/// A response of the owner's that it need not run any longer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Notice {
    pub key: ResponseKey,
    pub kind: NoticeKind,
    /// When, in Unix milliseconds by the store's clock.
    pub at_ms: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NoticeKind {
    Cancelled,
    Deleted,
}

impl NoticeKind {
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Cancelled => "cancelled",
            Self::Deleted => "deleted",
        }
    }
}

/// How far an owner has read its notices. Only the store that made it can read it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct NoticeCursor(pub u64, pub u64);

/// One owner's notices, the oldest dropped first.
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
