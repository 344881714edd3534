//! Why a stream is not continued.

/// Why a stream whose worker is lost ends as it would without continuation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::relay) enum Refusal {
    /// Neither chat completions nor completions.
    Api,
    /// The body is not as engines accept it.
    Body,
    /// JSON, a grammar or a choice is enforced: it would start again at its root.
    Grammar,
    /// A tool must be called.
    ToolChoice,
    /// The seed's random numbers are lost.
    Seed,
    /// Frequency or presence penalty: tokens of the answer would count as prompt.
    Penalty,
    /// More than one answer, prompt or beam.
    Several,
    /// The answer has the prompt in it, or its log probabilities.
    PromptOutput,
    /// Images, audio or embeddings are not in the token ids.
    Media,
    /// Text may be held back because a stop string may begin in it.
    StopStrings,
    /// The prompt is cut by the engine.
    Truncated,
    /// Log probabilities of completions have positions in the text.
    Logprobs,
    /// The client asks for token ids itself.
    TokenIds,
    /// Reasoning is hidden, and its tokens with it.
    HiddenTokens,
    /// The engine sent text without token ids.
    NoTokenIds,
    /// Prompt and answer are longer than `max_tokens`.
    TooLong,
    /// A tool call has started: parsers do not go on in the middle of one.
    ToolCall,
    /// The answer was complete.
    Finished,
    /// The stream was continued `max_per_request` times.
    Limit,
    /// The next worker's text does not join.
    Seam,
    /// Of a background response, what is stored does not have the token ids of all its text.
    NotStored,
    /// The name leads to another model than before.
    OtherModel,
}

impl Refusal {
    const ALL: [Self; 22] = [
        Self::Api,
        Self::Body,
        Self::Grammar,
        Self::ToolChoice,
        Self::Seed,
        Self::Penalty,
        Self::Several,
        Self::PromptOutput,
        Self::Media,
        Self::StopStrings,
        Self::Truncated,
        Self::Logprobs,
        Self::TokenIds,
        Self::HiddenTokens,
        Self::NoTokenIds,
        Self::TooLong,
        Self::ToolCall,
        Self::Finished,
        Self::Limit,
        Self::Seam,
        Self::NotStored,
        Self::OtherModel,
    ];

    /// What [`Refusal::as_str`] wrote; a reason that this release does not know counts as one that is not stored.
    pub(super) fn read(text: &[u8]) -> Self {
        let mut all = Self::ALL.into_iter();
        let found = all.find(|refusal| refusal.as_str().as_bytes() == text);
        found.unwrap_or(Self::NotStored)
    }

    /// The reason that is written so.
    pub(super) fn named(text: &str) -> Option<&'static str> {
        let mut all = Self::ALL.into_iter().map(Self::as_str);
        all.find(|name| *name == text)
    }

    pub(in crate::relay) fn as_str(self) -> &'static str {
        match self {
            Self::Api => "api",
            Self::Body => "body",
            Self::Grammar => "grammar",
            Self::ToolChoice => "tool_choice",
            Self::Seed => "seed",
            Self::Penalty => "penalty",
            Self::Several => "several_answers",
            Self::PromptOutput => "prompt_output",
            Self::Media => "media",
            Self::StopStrings => "stop_strings",
            Self::Truncated => "truncated_prompt",
            Self::Logprobs => "logprobs",
            Self::TokenIds => "token_ids_asked",
            Self::HiddenTokens => "hidden_tokens",
            Self::NoTokenIds => "no_token_ids",
            Self::TooLong => "too_long",
            Self::ToolCall => "tool_call",
            Self::Finished => "finished",
            Self::Limit => "limit",
            Self::Seam => "seam",
            Self::NotStored => "not_stored",
            Self::OtherModel => "other_model",
        }
    }
}
