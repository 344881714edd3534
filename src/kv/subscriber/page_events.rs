//! The events of an engine that caches pages in a radix tree (SGLang): small pages are folded into blocks, and the pages'
//! names show whether they depend on more than the tokens that they are reported with. No I/O.

use tracing::warn;

use super::batch_effect::BatchEffect;
use crate::kv::event::{Batch, Event, Stored, Tier};
use crate::kv::event_filter::{IgnoredReason, TreeImpact, tier};
use crate::kv::page_fold::{PageFold, Unfoldable};
use crate::kv::page_hash;

#[derive(Debug, Default)]
pub(super) struct PageEvents {
    fold: Option<PageFold>,
    /// A page of this process was named after its tokens, so one that is not depends on something else.
    has_matched: bool,
    is_logged: bool,
}

impl PageEvents {
    /// The engine's process may be another one, or its tree was cleared.
    pub(super) fn clear(&mut self) {
        self.fold = None;
        self.has_matched = false;
    }

    /// The batch in blocks, without the stores that cannot be told apart from others. `None`: as it is.
    pub(super) fn read(&mut self, batch: &Batch, effect: &mut BatchEffect) -> Option<Batch> {
        let is_plain = |event: &Event| match event {
            Event::Stored(stored) => PageFold::for_pages(stored.block_size).is_none(),
            Event::Removed(_) | Event::Cleared { .. } | Event::Unknown { .. } => true,
        };
        let has_foreign = batch.events.iter().any(|event| !self.is_own(event));
        if self.fold.is_none() && !has_foreign && batch.events.iter().all(is_plain) {
            return None;
        }
        let mut events = Vec::with_capacity(batch.events.len());
        for event in &batch.events {
            if self.is_own(event) {
                self.fold_event(event, &mut events, effect);
            } else {
                effect.ignored.push(IgnoredReason::HashMismatch);
            }
        }
        effect.events += batch.events.len().saturating_sub(events.len()) as u64;
        Some(Batch {
            timestamp: batch.timestamp,
            rank: batch.rank,
            events,
            joined: batch.joined,
        })
    }

    fn fold_event(&mut self, event: &Event, events: &mut Vec<Event>, effect: &mut BatchEffect) {
        let folded = match event {
            Event::Stored(stored) => {
                if self.fold.is_none() {
                    self.fold = PageFold::for_pages(stored.block_size);
                }
                match (&mut self.fold, tier(&stored.location.medium)) {
                    (Some(fold), Ok(tier)) => fold.store(stored, tier),
                    _ => return events.push(event.clone()),
                }
            }
            Event::Removed(removed) => match (&mut self.fold, tier(&removed.location.medium)) {
                (Some(fold), Ok(tier)) => fold.remove(removed, tier),
                _ => return events.push(event.clone()),
            },
            Event::Cleared { .. } => {
                if let Some(fold) = &mut self.fold {
                    fold.clear();
                }
                return events.push(event.clone());
            }
            Event::Unknown { .. } => return events.push(event.clone()),
        };
        match folded {
            Ok(folded) => events.extend(folded),
            Err(Unfoldable::Torn) => {
                self.fold = None;
                // Clears the tree.
                events.push(Event::Unknown {
                    kind: "torn pages".into(),
                    hashes: None,
                });
            }
            Err(unfoldable) => {
                effect.ignored.push(match unfoldable {
                    Unfoldable::TooMany => IgnoredReason::IndexFull,
                    Unfoldable::Inconsistent | Unfoldable::Torn => {
                        IgnoredReason::InconsistentFields
                    }
                });
                effect.impact = effect.impact.max(TreeImpact::Incomplete);
            }
        }
    }

    /// False for pages that are named after something that is not reported, such as SGLang's `extra_key` with the event
    /// format `dynamo`: prompts that the router sends cannot reuse them.
    fn is_own(&mut self, event: &Event) -> bool {
        let Event::Stored(stored) = event else {
            return true;
        };
        if tier(&stored.location.medium) != Ok(Tier::Gpu) {
            return true;
        }
        match page_hash::names_its_tokens(stored) {
            None => true,
            Some(true) => {
                self.has_matched = true;
                true
            }
            Some(false) => {
                self.log(stored);
                !self.has_matched
            }
        }
    }

    fn log(&mut self, stored: &Stored) {
        if !std::mem::replace(&mut self.is_logged, true) {
            warn!(
                page_size = stored.block_size,
                is_ignored = self.has_matched,
                "the engine names a page otherwise than by its tokens; requests with an extra_key reached it, or its release hashes in another way"
            );
        }
    }
}
