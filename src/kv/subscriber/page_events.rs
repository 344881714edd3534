//! The events of an engine that caches pages in a radix tree (SGLang): small pages are folded into blocks, and the pages'
//! names show whether they depend on more than the tokens that they are reported with. No I/O.

use std::sync::Arc;

use tracing::warn;

use super::batch_effect::BatchEffect;
use crate::kv::event::{Batch, Event, Stored, Tier, is_own_cache};
use crate::kv::event_filter::{IgnoredReason, TreeImpact, tier};
use crate::kv::indexes::PrefixIndexes;
use crate::kv::page_fold::{PageFold, Unfoldable};
use crate::kv::page_hash;

#[derive(Debug)]
pub(super) struct PageEvents {
    /// Have the memory limit that pages count in.
    indexes: Arc<PrefixIndexes>,
    pub(super) fold: Option<PageFold>,
    /// A page of this process was named after its tokens, so one that is not depends on something else.
    pub(super) has_matched: bool,
    is_logged: bool,
}

impl PageEvents {
    pub(super) fn new(indexes: Arc<PrefixIndexes>) -> Self {
        Self {
            indexes,
            fold: None,
            has_matched: false,
            is_logged: false,
        }
    }

    fn fold_for(&self, page_size: u32) -> Option<PageFold> {
        let fold = PageFold::for_pages(page_size)?;
        Some(fold.with_memory(self.indexes.page_memory()))
    }

    /// Begins with another replica's pages, of which there are none yet. What was learned of the process stays. `None`
    /// for pages that are blocks already.
    pub(super) fn begin_graft(&mut self, page_size: u32) -> Option<&mut PageFold> {
        self.fold = self.fold_for(page_size);
        self.fold.as_mut()
    }

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
                    self.fold = self.fold_for(stored.block_size);
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
            Event::Cleared { ownership } => {
                if let Some(fold) = &mut self.fold
                    && is_own_cache(ownership.as_deref())
                {
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
            Err(Unfoldable::Inconsistent) => {
                effect.ignored.push(IgnoredReason::InconsistentFields);
                effect.impact = effect.impact.max(TreeImpact::Incomplete);
            }
        }
        let fold = self.fold.as_mut();
        if fold.is_some_and(|fold| fold.take_forgotten() > 0) {
            effect.ignored.push(IgnoredReason::IndexFull);
            effect.impact = effect.impact.max(TreeImpact::Incomplete);
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
