//! The status of a response, and its transitions.

use crate::observe::metrics::words;

words! {
    /// The status of a response, as clients see it in `status`, and as stores write it. The last four are terminal:
    /// only deletion follows.
    #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
    pub enum Status: Display {
        Queued = "queued",
        InProgress = "in_progress",
        Completed = "completed",
        Incomplete = "incomplete",
        Failed = "failed",
        Cancelled = "cancelled",
    }
}

impl Status {
    pub fn parse(text: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|status| status.as_str() == text)
    }

    pub fn is_terminal(self) -> bool {
        !matches!(self, Self::Queued | Self::InProgress)
    }

    /// Whether another response may continue it.
    pub fn is_continuable(self) -> bool {
        matches!(self, Self::Completed | Self::Incomplete)
    }

    /// Whether this status may change to `next`. A takeover changes no status: the new owner continues with the
    /// status that it finds.
    pub fn may_become(self, next: Self) -> bool {
        match self {
            Self::Queued => next != Self::Queued,
            Self::InProgress => next.is_terminal(),
            Self::Completed | Self::Incomplete | Self::Failed | Self::Cancelled => false,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_terminal_status_never_changes() {
        for from in Status::ALL {
            for to in Status::ALL {
                let expected = match (from, to) {
                    (Status::Queued, to) => to != Status::Queued,
                    (Status::InProgress, to) => to.is_terminal(),
                    _ => false,
                };
                assert_eq!(from.may_become(to), expected, "{from} -> {to}");
            }
        }
    }

    #[test]
    fn a_status_survives_encoding() {
        for status in Status::ALL {
            assert_eq!(Status::parse(status.as_str()), Some(status));
        }
        assert_eq!(Status::parse("done"), None);
    }
}
