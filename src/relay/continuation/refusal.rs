//! Why a stream is not continued.

use crate::observe::metrics::words;

words! {
    /// Why a stream whose worker is lost ends as it would without continuation.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub(in crate::relay) enum Refusal {
        /// Neither chat completions nor completions.
        Api = "api",
        /// The body is not as engines accept it.
        Body = "body",
        /// JSON, a grammar or a choice is enforced: it would start again at its root.
        Grammar = "grammar",
        /// A tool must be called.
        ToolChoice = "tool_choice",
        /// The seed's random numbers are lost.
        Seed = "seed",
        /// Frequency or presence penalty: tokens of the answer would count as prompt.
        Penalty = "penalty",
        /// More than one answer, prompt or beam.
        Several = "several_answers",
        /// The answer has the prompt in it, or its log probabilities.
        PromptOutput = "prompt_output",
        /// Images, audio or embeddings are not in the token ids.
        Media = "media",
        /// Text may be held back because a stop string may begin in it.
        StopStrings = "stop_strings",
        /// The prompt is cut by the engine.
        Truncated = "truncated_prompt",
        /// Log probabilities of completions have positions in the text.
        Logprobs = "logprobs",
        /// The client asks for token ids itself.
        TokenIds = "token_ids_asked",
        /// Reasoning is hidden, and its tokens with it.
        HiddenTokens = "hidden_tokens",
        /// The engine sent text without token ids.
        NoTokenIds = "no_token_ids",
        /// Prompt and answer are longer than `max_tokens`.
        TooLong = "too_long",
        /// A tool call has started: parsers do not go on in the middle of one.
        ToolCall = "tool_call",
        /// The answer was complete.
        Finished = "finished",
        /// The stream was continued `max_per_request` times.
        Limit = "limit",
        /// The next worker's text does not join, or it does not go on from the tokens that it was given.
        Seam = "seam",
        /// Of a background response, what is stored does not have the token ids of all its text.
        NotStored = "not_stored",
        /// The name leads to another model than before.
        OtherModel = "other_model",
    }
}

impl Refusal {
    /// What [`Refusal::as_str`] wrote. `None`: this release does not know it.
    pub(super) fn read(text: &[u8]) -> Option<Self> {
        let mut all = Self::ALL.into_iter();
        all.find(|refusal| refusal.as_str().as_bytes() == text)
    }
}

/// The reason for which streams are not continued that is written so.
pub fn refusal_named(text: &str) -> Option<&'static str> {
    Refusal::read(text.as_bytes()).map(Refusal::as_str)
}
