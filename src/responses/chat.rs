//! Responses over workers that speak chat completions only. Two pure machines: items to messages ([`body`]), chunks to
//! events ([`answer`]). Everything else of the Responses API sees the native request and the native answer.

mod answer;
mod body;
mod call;
mod chunk;
mod custom_input;
mod end;
mod engine_answer;
mod item;
mod messages;
mod parts;
mod settings;
mod tools;
mod writer;
mod written;

pub(super) use self::body::{ChatBody, chat_body};
pub(super) use self::engine_answer::{native_body, native_whole};
pub use self::settings::{
    ChatSettings, InvalidArguments, OutputLimit, SystemMessages, UnsupportedTools,
};
pub(super) use self::tools::AnsweredTools;
pub(super) use self::written::Written;

/// For the fuzz target: what a chat stream is for a client, however it is cut.
#[must_use]
pub fn converted(pieces: &[&[u8]]) -> Vec<u8> {
    engine_answer::converted(AnsweredTools::default(), pieces)
}

#[cfg(test)]
mod tests;
