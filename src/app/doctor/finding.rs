//! What a rule has found.

use std::fmt::Display;

use serde::Serialize;

/// Something that costs the fleet, and what to change.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Finding {
    pub rule: &'static str,
    /// The model whose workers it is about, of a rule that may find one for each model from moment to moment.
    #[serde(skip)]
    pub(super) model: Option<String>,
    /// Clients get errors by it now, or the next failure makes it so.
    pub is_broken: bool,
    /// About what part of the requests it costs something, 0 to 1, weighted by how much.
    pub cost: f64,
    /// What was found, with numbers.
    pub problem: String,
    /// What it costs.
    pub effect: &'static str,
    /// The line to change: YAML of the router, or a flag of the engine.
    pub change: String,
}

/// Names of workers, of which a few are shown.
pub(super) const SHOWN: usize = 5;

/// `w0, w1 and 3 more`.
pub(super) fn listed<T: Display>(names: impl IntoIterator<Item = T>) -> String {
    let names: Vec<String> = names.into_iter().map(|name| name.to_string()).collect();
    match names.len().checked_sub(SHOWN) {
        None | Some(0) => names.join(", "),
        Some(more) => format!("{} and {more} more", names[..SHOWN].join(", ")),
    }
}
