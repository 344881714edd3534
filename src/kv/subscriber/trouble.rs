//! Something that goes wrong again and again, and is worth a word in the log when it does so in
//! another way.

use std::time::{Duration, Instant};

/// What comes from engines must not fill a log, whatever it is.
const PAUSE: Duration = Duration::from_secs(10);

#[derive(Debug, Default)]
pub(super) struct Trouble {
    /// As it was last told.
    told: Option<String>,
    told_at: Option<Instant>,
}

impl Trouble {
    /// Whether to tell of it now.
    pub(super) fn is_news(&mut self, now: Instant, why: &str) -> bool {
        let is_soon = self.told_at.is_some_and(|at| now < at + PAUSE);
        if is_soon || self.told.as_deref() == Some(why) {
            return false;
        }
        self.told = Some(why.to_owned());
        self.told_at = Some(now);
        true
    }

    /// It went well; the next time it does not is news.
    pub(super) fn is_over(&mut self) {
        self.told = None;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn trouble_is_news_once_and_seldom() {
        let start = crate::observe::now();
        let at = |seconds| start + Duration::from_secs(seconds);
        let mut trouble = Trouble::default();
        assert!(trouble.is_news(start, "refused"));
        assert!(!trouble.is_news(at(100), "refused"));
        assert!(trouble.is_news(at(100), "cut"));
        assert!(!trouble.is_news(at(105), "refused"));
        assert!(trouble.is_news(at(110), "refused"));
        trouble.is_over();
        assert!(!trouble.is_news(at(111), "refused"));
        assert!(trouble.is_news(at(120), "refused"));
    }
}
