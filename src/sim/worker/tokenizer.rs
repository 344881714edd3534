//! A simulated tokenizer: every four bytes are a token, whose id is a hash of them. Pure.
//!
//! Texts with a common prefix have tokens with a common prefix, as a prefix cache needs. Generated words are four bytes
//! long and every turn of a chat starts a new token, so an answer that is part of the next request has the same tokens
//! as when it was generated.

use std::collections::HashMap;
use std::sync::LazyLock;

use xxhash_rust::xxh3::{Xxh3, xxh3_64};

const TOKEN_BYTES: usize = 4;
const VOCABULARY: u64 = 150_000;

/// The words of answers.
const WORDS: [&str; 64] = [
    "ash ", "bay ", "bee ", "bow ", "cup ", "day ", "dew ", "elm ", "eve ", "fen ", "fig ", "fir ",
    "fog ", "fox ", "gem ", "hay ", "hen ", "hill", "hut ", "ice ", "ink ", "ivy ", "jar ", "jay ",
    "key ", "kit ", "lake", "leaf", "log ", "map ", "mist", "moon", "moss", "nest", "nut ", "oak ",
    "oar ", "owl ", "path", "pea ", "pen ", "pie ", "pine", "pond", "rain", "reed", "rye ", "sea ",
    "sky ", "snow", "star", "sun ", "tea ", "tide", "tree", "twig", "vale", "vine", "wave", "wind",
    "wing", "wood", "yew ", "zen ",
];

/// The word of an answer that was generated from the blocks of another prompt.
const WRONG: &str = "BAD ";

static WORD_OF_ID: LazyLock<HashMap<u32, &'static str>> = LazyLock::new(|| {
    WORDS
        .iter()
        .chain([&WRONG])
        .map(|word| (id(word.as_bytes()), *word))
        .collect()
});

/// One message of a conversation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Turn {
    pub(crate) role: String,
    pub(crate) text: String,
}

pub(crate) fn encode(text: &str) -> Vec<u32> {
    text.as_bytes().chunks(TOKEN_BYTES).map(id).collect()
}

/// Renders a conversation as ChatML, in segments that are tokenized separately.
pub(crate) fn render(turns: &[Turn], add_generation_prompt: bool) -> Vec<String> {
    let mut segments = Vec::with_capacity(turns.len() * 3 + 1);
    for turn in turns {
        segments.push(format!("<|im_start|>{}\n", turn.role));
        segments.push(turn.text.clone());
        segments.push("<|im_end|>\n".to_owned());
    }
    if add_generation_prompt {
        segments.push("<|im_start|>assistant\n".to_owned());
    }
    segments
}

/// The prompt of a conversation to be answered.
pub(crate) fn encode_turns(turns: &[Turn]) -> Vec<u32> {
    let segments = render(turns, true);
    segments.iter().flat_map(|text| encode(text)).collect()
}

/// The answer to a prompt, always the same one. Each token follows from all tokens before it, as with a model that takes
/// the likeliest one: a prompt that ends with the beginning of its own answer is answered with the rest.
pub(crate) fn answer(prompt: &[u32], tokens: usize) -> Vec<u32> {
    let mut hasher = Xxh3::new();
    for token in prompt {
        hasher.update(&token.to_le_bytes());
    }
    let mut next = || {
        let word = WORDS[(hasher.digest() % WORDS.len() as u64) as usize];
        let token = id(word.as_bytes());
        hasher.update(&token.to_le_bytes());
        token
    };
    (0..tokens).map(|_| next()).collect()
}

/// The answer if the transferred blocks were those of another prompt.
pub(crate) fn wrong(tokens: usize) -> Vec<u32> {
    vec![id(WRONG.as_bytes()); tokens]
}

/// Changes the tokens from index `from` on, as a different tokenizer would.
pub(crate) fn garble(prompt: &mut [u32], from: usize) {
    for token in prompt.iter_mut().skip(from) {
        *token = (*token + 1) % VOCABULARY as u32;
    }
}

/// The text of tokens. Only generated words can be decoded; other tokens become `<id>`.
pub(crate) fn decode(tokens: &[u32]) -> String {
    let mut text = String::new();
    for token in tokens {
        match WORD_OF_ID.get(token) {
            Some(word) => text.push_str(word),
            None => text.push_str(&format!("<{token}>")),
        }
    }
    text
}

fn id(piece: &[u8]) -> u32 {
    (xxh3_64(piece) % VOCABULARY) as u32
}

#[cfg(test)]
mod tests {
    use super::*;

    fn turn(role: &str, text: &str) -> Turn {
        Turn {
            role: role.to_owned(),
            text: text.to_owned(),
        }
    }

    #[test]
    fn every_word_is_one_token_of_its_own() {
        assert_eq!(WORD_OF_ID.len(), WORDS.len() + 1);
        for word in WORDS {
            assert_eq!(encode(word).len(), 1, "{word:?}");
            assert_eq!(decode(&encode(word)), word);
        }
    }

    #[test]
    fn the_next_turn_begins_with_the_prompt_and_its_answer() {
        let mut turns = vec![turn("system", "be brief"), turn("user", "hello there")];
        let prompt = encode_turns(&turns);
        let generated = answer(&prompt, 7);
        turns.push(turn("assistant", &decode(&generated)));
        turns.push(turn("user", "go on"));
        let next = encode_turns(&turns);
        assert!(next.starts_with(&[prompt, generated].concat()));
    }

    #[test]
    fn an_answer_goes_on_where_its_beginning_ends() {
        let prompt = encode("once upon a time");
        let whole = answer(&prompt, 20);
        for kept in 0..20 {
            let longer = [&prompt[..], &whole[..kept]].concat();
            assert_eq!(answer(&longer, 20 - kept), whole[kept..]);
        }
    }

    #[test]
    fn the_same_prompt_gets_the_same_answer_and_another_a_different_one() {
        let prompt = encode("one");
        assert_eq!(answer(&prompt, 20), answer(&prompt, 20));
        assert_eq!(answer(&prompt, 20)[..5], answer(&prompt, 5));
        assert_ne!(answer(&prompt, 20), answer(&encode("two"), 20));
    }
}
