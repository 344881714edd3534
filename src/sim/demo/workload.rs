//! The demo's workload: from a seed, the users, their conversations and their questions. Pure.
//!
//! The users of a group share a long system prompt, as the users of one product do, and some groups have more users
//! than others. The engines' answers become part of a conversation at run time.

use std::sync::Arc;
use std::time::Duration;

use fastrand::Rng;
use serde_json::{Value, json};

use crate::units::parse_nonzero_milliseconds;

/// Bytes per token, both in the simulated tokenizer and in the router's estimate.
const TOKEN_BYTES: usize = 4;
const WORDS: [&str; 32] = [
    "about", "answer", "before", "build", "carry", "change", "clear", "count", "cover", "date",
    "each", "field", "first", "given", "keep", "line", "list", "never", "note", "order", "other",
    "page", "part", "plain", "reply", "rule", "same", "short", "state", "table", "when", "write",
];

#[derive(clap::Args, Clone, Debug)]
#[group(skip)]
pub(super) struct Settings {
    /// Users that talk to the engines at the same time.
    #[arg(long, value_name = "USERS", default_value_t = 32, value_parser = clap::value_parser!(u32).range(1..=10_000))]
    pub(super) users: u32,

    /// Groups of users; each group has a system prompt of its own.
    #[arg(long, value_name = "GROUPS", default_value_t = 16, value_parser = clap::value_parser!(u32).range(1..=1_000))]
    pub(super) groups: u32,

    /// Conversations per user, one after the other.
    #[arg(long, value_name = "CONVERSATIONS", default_value_t = 2, value_parser = clap::value_parser!(u32).range(1..=1_000))]
    pub(super) conversations: u32,

    /// Questions per conversation; 4 with --disaggregated.
    #[arg(
        long,
        value_name = "TURNS",
        default_value_t = 6,
        default_value_if("disaggregated", "true", "4"),
        value_parser = clap::value_parser!(u32).range(1..=100),
    )]
    pub(super) turns: u32,

    /// Length of a system prompt; 500 with --disaggregated.
    #[arg(
        long,
        value_name = "TOKENS",
        default_value_t = 3_000,
        default_value_if("disaggregated", "true", "500"),
        value_parser = clap::value_parser!(u32).range(1..=16_000),
    )]
    pub(super) system_tokens: u32,

    /// Average length of a question; 1,500 with --disaggregated, as with a document in each.
    #[arg(
        long,
        value_name = "TOKENS",
        default_value_t = 200,
        default_value_if("disaggregated", "true", "1500"),
        value_parser = clap::value_parser!(u32).range(2..=4_000),
    )]
    pub(super) question_tokens: u32,

    /// Length of an answer; 64 with --disaggregated.
    #[arg(
        long,
        value_name = "TOKENS",
        default_value_t = 24,
        default_value_if("disaggregated", "true", "64"),
        value_parser = clap::value_parser!(u32).range(1..=4_000),
    )]
    pub(super) answer_tokens: u32,

    /// Average time between an answer and the next question; 1500ms with --disaggregated. Real users take
    /// longer.
    #[arg(
        long = "reading-time",
        value_name = "DURATION",
        default_value = "300ms",
        default_value_if("disaggregated", "true", "1500ms"),
        value_parser = parse_nonzero_milliseconds,
    )]
    pub(super) reading_ms: u64,

    /// Seed of the conversations; the same seed gives the same conversations.
    #[arg(long, value_name = "NUMBER", default_value_t = 1)]
    pub(super) seed: u64,
}

impl Settings {
    pub(super) fn requests(&self) -> u64 {
        u64::from(self.users) * u64::from(self.conversations) * u64::from(self.turns)
    }
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct User {
    pub(super) conversations: Vec<Conversation>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Conversation {
    pub(super) system: Arc<str>,
    pub(super) turns: Vec<Turn>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Turn {
    /// The time between the previous answer and this question.
    pub(super) pause: Duration,
    pub(super) question: String,
}

pub(super) fn users(settings: &Settings) -> Vec<User> {
    let mut rng = Rng::with_seed(settings.seed);
    let systems: Vec<Arc<str>> = (0..settings.groups)
        .map(|_| text(&mut rng, settings.system_tokens).into())
        .collect();
    (0..settings.users as usize)
        .map(|user| {
            let group = group(&mut rng, user, systems.len());
            let conversations = (0..settings.conversations).map(|index| Conversation {
                system: systems[group].clone(),
                turns: turns(settings, &mut rng, index == 0),
            });
            User {
                conversations: conversations.collect(),
            }
        })
        .collect()
}

/// The group of a user: each group gets one user, and the first groups get more of the remaining users.
fn group(rng: &mut Rng, user: usize, groups: usize) -> usize {
    if user < groups {
        user
    } else {
        rng.usize(..groups).min(rng.usize(..groups))
    }
}

fn turns(settings: &Settings, rng: &mut Rng, is_first_conversation: bool) -> Vec<Turn> {
    let (average_tokens, average_ms) = (settings.question_tokens, settings.reading_ms);
    (0..settings.turns)
        .map(|index| {
            let pause_ms = if is_first_conversation && index == 0 {
                // Spread the start of the users.
                0..=average_ms * 5
            } else {
                average_ms / 2..=average_ms + average_ms / 2
            };
            let tokens = rng.u32(average_tokens / 2..=average_tokens + average_tokens / 2);
            Turn {
                pause: Duration::from_millis(rng.u64(pause_ms)),
                question: text(rng, tokens),
            }
        })
        .collect()
}

fn text(rng: &mut Rng, tokens: u32) -> String {
    let bytes = tokens as usize * TOKEN_BYTES;
    let mut text = String::with_capacity(bytes + 8);
    while text.len() < bytes {
        text.push_str(WORDS[rng.usize(..WORDS.len())]);
        text.push(' ');
    }
    text.truncate(bytes);
    text
}

/// The messages of a conversation so far.
#[derive(Clone, Debug)]
pub(super) struct Dialogue {
    messages: Vec<Value>,
}

impl Dialogue {
    pub(super) fn new(system: &str) -> Self {
        let mut dialogue = Self {
            messages: Vec::new(),
        };
        dialogue.push("system", system);
        dialogue
    }

    /// Adds the next question and returns the request body for it.
    pub(super) fn ask(&mut self, model: &str, question: &str, answer_tokens: u32) -> String {
        self.push("user", question);
        let body = json!({
            "model": model,
            "messages": self.messages,
            "max_tokens": answer_tokens,
            "stream": true,
            "stream_options": {"include_usage": true},
        });
        body.to_string()
    }

    pub(super) fn add_answer(&mut self, answer: &str) {
        self.push("assistant", answer);
    }

    fn push(&mut self, role: &str, content: &str) {
        self.messages
            .push(json!({"role": role, "content": content}));
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    fn settings(seed: u64) -> Settings {
        Settings {
            users: 5,
            groups: 2,
            conversations: 2,
            turns: 3,
            system_tokens: 50,
            question_tokens: 10,
            answer_tokens: 4,
            reading_ms: 10,
            seed,
        }
    }

    #[test]
    fn users_depend_on_the_seed_only() {
        assert_eq!(users(&settings(1)), users(&settings(1)));
        assert_ne!(users(&settings(1)), users(&settings(2)));
    }

    #[test]
    fn users_of_a_group_share_a_system_prompt_and_nothing_else() {
        let users = users(&Settings {
            groups: 1,
            ..settings(1)
        });
        let first = |user: usize| &users[user].conversations[0];
        assert_eq!(first(0).system, first(1).system);
        assert_ne!(first(0).turns, first(1).turns);
        assert_eq!(first(0).system.len(), 50 * TOKEN_BYTES);
    }

    #[test]
    fn no_group_is_empty() {
        let users = users(&settings(1));
        let systems = |user: &User| user.conversations[0].system.clone();
        let groups: BTreeSet<Arc<str>> = users.iter().map(systems).collect();
        assert_eq!(groups.len(), 2);
    }

    #[test]
    fn the_number_of_requests_is_known_in_advance() {
        let settings = settings(1);
        let all = users(&settings);
        let conversations = all.iter().flat_map(|user| &user.conversations);
        let requests: usize = conversations
            .map(|conversation| conversation.turns.len())
            .sum();
        assert_eq!(requests as u64, settings.requests());
    }

    #[test]
    fn each_request_extends_the_previous_one() {
        let users = users(&settings(1));
        let conversation = &users[0].conversations[0];
        let mut dialogue = Dialogue::new(&conversation.system);
        let mut before: Vec<Value> = Vec::new();
        for turn in &conversation.turns {
            let body: Value =
                serde_json::from_str(&dialogue.ask("sim", &turn.question, 4)).unwrap();
            let messages = body["messages"].as_array().unwrap().clone();
            assert!(messages.starts_with(&before));
            assert_eq!(messages.last().unwrap()["content"], *turn.question);
            dialogue.add_answer("so it is");
            before = messages;
        }
        // System prompt, three questions, and the answers to the first two.
        assert_eq!(before.len(), 6);
    }
}
