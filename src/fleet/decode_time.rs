//! How long workers take for a token of an answer: seen from streams that ended, compared within a model. Pure.
//!
//! Each replica learns on its own, from its own streams.

mod compare;
mod fleet;
mod seen;

pub use self::compare::compare;
pub use self::fleet::update;
pub use self::seen::DecodeTimes;
