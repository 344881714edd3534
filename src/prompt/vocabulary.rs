//! A model's tokenizer: text to token ids, in pieces that are independent of each other, so that the ids of a
//! piece can be cached. Pure apart from loading.
//!
//! `fastokens` tokenizes; a test compares it with `tokenizers`, token for token. `boundaries` finds where a text may
//! be split.

mod boundaries;

use std::panic::{AssertUnwindSafe, catch_unwind};

use serde_json::Value;

use self::boundaries::Boundaries;
pub use self::boundaries::Pieces;

/// Used to reserve memory for ids: a token is about four bytes long, and rarely less than three.
const MIN_BYTES_PER_TOKEN: usize = 3;

pub struct Vocabulary {
    tokenizer: fastokens::Tokenizer,
    boundaries: Boundaries,
    bos: Vec<u32>,
    eos: Vec<u32>,
    /// A text that begins with neither a space nor an added token is tokenized as if it began with a space.
    begins_with_space: bool,
}

impl std::fmt::Debug for Vocabulary {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Vocabulary")
            .field("tokens", &self.tokenizer.vocab_size())
            .finish_non_exhaustive()
    }
}

impl Vocabulary {
    /// Loads a `tokenizer.json`. Truncation and padding are for training and are removed, as engines do.
    pub fn new(mut json: Value) -> Result<Self, String> {
        if let Value::Object(json) = &mut json {
            json.insert("truncation".to_owned(), Value::Null);
            json.insert("padding".to_owned(), Value::Null);
        }
        let boundaries = Boundaries::new(&json)?;
        let tokenizer = fastokens::Tokenizer::from_json(json).map_err(|error| error.to_string())?;
        let mut vocabulary = Self {
            tokenizer,
            boundaries,
            bos: Vec::new(),
            eos: Vec::new(),
            begins_with_space: false,
        };
        (vocabulary.bos, vocabulary.eos) = vocabulary.find_bos_eos()?;
        Ok(vocabulary)
    }

    #[must_use]
    pub fn with_first_space(self, begins_with_space: bool) -> Self {
        Self {
            begins_with_space,
            ..self
        }
    }

    /// Whether a text must get a space before it is split into pieces.
    pub fn lacks_first_space(&self, text: &str) -> bool {
        self.begins_with_space
            && !text.is_empty()
            && !text.starts_with([' ', '▁'])
            && !self.boundaries.starts_with_token(text)
    }

    /// The BOS and EOS ids, which are added around a text if the request asks for special tokens.
    pub fn bos_eos(&self) -> (&[u32], &[u32]) {
        (&self.bos, &self.eos)
    }

    /// Length of the longest added token that is matched in the raw text.
    pub fn max_token_bytes(&self) -> usize {
        self.boundaries.max_token_bytes
    }

    /// Splits a text. The ids of the pieces, one after the other, are the ids of the text.
    pub fn pieces<'v, 't>(&'v self, text: &'t str) -> Pieces<'v, 't> {
        self.boundaries.pieces(text)
    }

    /// Appends the ids of a text or of one of its pieces, without BOS and EOS.
    pub fn encode(&self, text: &str, ids: &mut Vec<u32>) -> Result<(), String> {
        // The text comes from a client. If the tokenizer panics, the request is routed by prediction.
        let encoded = catch_unwind(AssertUnwindSafe(|| self.tokenizer.encode(text)));
        let encoded = encoded
            .map_err(|_| "the tokenizer panicked".to_owned())?
            .map_err(|error| error.to_string())?;
        if ids.capacity() == 0 {
            ids.reserve(text.len() / MIN_BYTES_PER_TOKEN);
        }
        ids.extend_from_slice(&encoded);
        Ok(())
    }

    /// The text of token ids, for people to read. An incomplete character at either end becomes �.
    pub fn decode(&self, ids: &[u32]) -> Option<String> {
        let text = catch_unwind(AssertUnwindSafe(|| self.tokenizer.decode(ids, false)));
        text.ok()?.ok()
    }

    /// Finds BOS and EOS by encoding a sample with and without them.
    fn find_bos_eos(&self) -> Result<(Vec<u32>, Vec<u32>), String> {
        const SAMPLE: &str = "a";
        let mut bare = Vec::new();
        self.encode(SAMPLE, &mut bare)?;
        let with_special = self
            .tokenizer
            .encode_with_special_tokens(SAMPLE, true)
            .map_err(|error| error.to_string())?;
        let start = with_special
            .windows(bare.len().max(1))
            .position(|window| window == bare)
            .ok_or("its post-processor does more than add tokens at the start and end")?;
        Ok((
            with_special[..start].to_vec(),
            with_special[start + bare.len()..].to_vec(),
        ))
    }
}

#[cfg(test)]
pub(in crate::prompt) mod tests;
