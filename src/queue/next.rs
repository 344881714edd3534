//! Who is next over all classes: looks ahead without changing anything.

use super::class::{Class, Walk};
use super::floors::{self, Floor};
use super::types::EntryId;

/// The requests of all classes in their order, if all that come before are sent.
#[derive(Debug)]
pub(super) struct Next<'a> {
    walks: Vec<Walk<'a>>,
    floors: Vec<Floor>,
}

impl<'a> Next<'a> {
    pub(super) fn new(classes: &'a [Class], floors: &[Floor]) -> Self {
        Self {
            walks: classes.iter().map(Class::walk).collect(),
            floors: floors.to_vec(),
        }
    }

    /// The next request, its class, and the tokens that it costs.
    pub(super) fn peek(&mut self) -> Option<(EntryId, usize, u64)> {
        let heads: Vec<_> = self.walks.iter_mut().map(Walk::peek).collect();
        let tokens: Vec<_> = heads
            .iter()
            .map(|head| head.map(|(_, tokens)| tokens))
            .collect();
        let class = floors::next(&self.floors, &tokens)?;
        heads[class].map(|(id, tokens)| (id, class, tokens))
    }

    /// Goes on to the one after it, as if it were sent.
    pub(super) fn advance(&mut self, class: usize, tokens: u64) {
        let waiting = |walk: &mut Walk<'_>| walk.peek().map(|(_, tokens)| tokens);
        let heads: Vec<_> = self.walks.iter_mut().map(waiting).collect();
        floors::on_sent(&mut self.floors, &heads, class, tokens);
        self.walks[class].advance();
    }
}
