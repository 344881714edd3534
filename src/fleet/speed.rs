//! How fast workers are: what a step of their engines takes, learnt from the answers that pass through. Pure.
//!
//! A step of an engine with continuous batching takes
//! `step + batch x (ANSWER x answers + CONTEXT x tokens of their contexts) + prompt_token x prompt tokens` seconds.
//! Three of these are learnt for each worker: `step`, `batch` and `prompt_token`. Each replica learns on its own, from its
//! own requests: speeds change slowly, two replicas' numbers of one worker need not agree to choose well, and nothing has to
//! be trusted when a replica leaves.

mod answers;
mod bounds;
mod fleet;
mod learner;
mod least_squares;
mod overhead;
mod own;
mod seen;
mod shared;
mod types;

pub use self::answers::AnswerTokens;
pub use self::bounds::GroupSpeed;
pub use self::fleet::Speeds;
pub use self::learner::Learner;
pub use self::own::OwnSpeed;
pub use self::seen::{LoadNow, Passed, Seen};
pub use self::shared::{SharedF32, SharedSpeed};
pub use self::types::{ANSWER, CONTEXT, Row, Speed};
