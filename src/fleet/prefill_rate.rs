//! How fast workers compute prompts: seen from first tokens, learnt for each worker, compared within a model. Pure.
//!
//! Each replica learns on its own, from its own requests: the rates change slowly, two replicas' rates of one worker need not
//! agree to choose well, and nothing has to be trusted or expired when a replica leaves.

mod compare;
mod fleet;
mod learner;
mod seen;
mod time_weight;

pub use self::compare::{BOUNDS, HYSTERESIS, compare, is_near};
pub use self::fleet::PrefillRates;
pub use self::learner::Learner;
pub use self::seen::{FirstToken, Sample, Seen};
pub use self::time_weight::TimeWeight;
