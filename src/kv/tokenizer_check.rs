//! Checks whether the router's token ids are those of the engines.
//!
//! After a request, the blocks of its prompt must be in the worker's tree: cached before, or reported as
//! stored. If they never are, tokenizer or chat template differ from the engine's, and KV events are
//! useless for routing such prompts; routing then ignores them until checks succeed again.
//!
//! - `results` judges (pure): when results raise and clear the alarm.
//! - `checker` is the handle for requests, routing and operators.
//! - `watcher` is the task that looks for the blocks.

mod checker;
pub mod difference;
mod results;
mod settings;
mod silence;
mod status;
mod types;
mod watcher;

pub use self::checker::{Prompt, PromptCheck, TokenizerCheck};
pub use self::settings::Settings;
pub use self::status::{Status, WorkerResults};
pub use self::types::{AlarmChange, Outcome, PromptSource, Subject};
pub use self::watcher::{Detokenize, IsServed, Watcher};
