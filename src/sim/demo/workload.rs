//! What the demo's users say: a seed -> users, their conversations, and each turn's request. Pure.
//!
//! Users come in groups that share a long system prompt, as the users of one product do, and some
//! products have more users than others. The engines' answers are not in here; they join a
//! conversation as they come.

use std::sync::Arc;
use std::time::Duration;

use fastrand::Rng;
use serde::Serialize;

/// What the pretend tokenizer and the router's own estimate both take for a token.
const TOKEN_BYTES: usize = 4;
const WORDS: [&str; 32] = [
    "about", "answer", "before", "build", "carry", "change", "clear", "count", "cover", "date",
    "each", "field", "first", "given", "keep", "line", "list", "never", "note", "order", "other",
    "page", "part", "plain", "reply", "rule", "same", "short", "state", "table", "when", "write",
];

#[derive(clap::Args, Clone, Debug)]
#[group(skip)]
pub(super) struct Settings {
    /// People who talk to the engines at the same time.
    #[arg(long, value_name = "USERS", default_value_t = 32, value_parser = clap::value_parser!(u32).range(1..=10_000))]
    pub(super) users: u32,

    /// System prompts; each user belongs to one of them.
    #[arg(long, value_name = "GROUPS", default_value_t = 16, value_parser = clap::value_parser!(u32).range(1..=1_000))]
    pub(super) groups: u32,

    /// Conversations that each user has, one after the other; 2 with --disaggregated.
    #[arg(
        long,
        value_name = "CONVERSATIONS",
        default_value_t = 3,
        default_value_if("disaggregated", "true", "2"),
        value_parser = clap::value_parser!(u32).range(1..=1_000),
    )]
    pub(super) conversations: u32,

    /// Questions in each conversation; 4 with --disaggregated.
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

    /// Average time between an answer and the next question, in milliseconds; 1,500 with
    /// --disaggregated. People take longer.
    #[arg(
        long,
        value_name = "MILLISECONDS",
        default_value_t = 300,
        default_value_if("disaggregated", "true", "1500"),
        value_parser = clap::value_parser!(u64).range(1..=60_000),
    )]
    pub(super) reading_ms: u64,

    /// Another seed makes other conversations; the same one makes the same.
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
    /// Between the last answer and this question.
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
            let conversations = (0..settings.conversations).map(|place| Conversation {
                system: systems[group].clone(),
                turns: turns(settings, &mut rng, place == 0),
            });
            User {
                conversations: conversations.collect(),
            }
        })
        .collect()
}

/// Every group gets a user, and of the other users the first groups get more than the last.
fn group(rng: &mut Rng, user: usize, groups: usize) -> usize {
    if user < groups {
        user
    } else {
        rng.usize(..groups).min(rng.usize(..groups))
    }
}

fn turns(settings: &Settings, rng: &mut Rng, is_arrival: bool) -> Vec<Turn> {
    let (average_tokens, average_ms) = (settings.question_tokens, settings.reading_ms);
    (0..settings.turns)
        .map(|place| {
            let pause_ms = if is_arrival && place == 0 {
                // Not all at once.
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

#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
struct Message {
    role: &'static str,
    content: String,
}

/// A conversation as far as it has come.
#[derive(Clone, Debug)]
pub(super) struct Dialogue {
    messages: Vec<Message>,
}

impl Dialogue {
    pub(super) fn new(system: &str) -> Self {
        let mut dialogue = Self {
            messages: Vec::new(),
        };
        dialogue.say("system", system);
        dialogue
    }

    /// The body of the request that asks the next question.
    pub(super) fn ask(&mut self, model: &str, question: &str, answer_tokens: u32) -> String {
        #[derive(Serialize)]
        struct Body<'a> {
            model: &'a str,
            messages: &'a [Message],
            max_tokens: u32,
            stream: bool,
            stream_options: StreamOptions,
        }
        #[derive(Serialize)]
        struct StreamOptions {
            include_usage: bool,
        }
        self.say("user", question);
        let body = Body {
            model,
            messages: &self.messages,
            max_tokens: answer_tokens,
            stream: true,
            stream_options: StreamOptions {
                include_usage: true,
            },
        };
        serde_json::to_string(&body).expect("only strings and numbers")
    }

    pub(super) fn hear(&mut self, answer: &str) {
        self.say("assistant", answer);
    }

    fn say(&mut self, role: &'static str, content: &str) {
        self.messages.push(Message {
            role,
            content: content.to_owned(),
        });
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use serde_json::Value;

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
    fn the_same_seed_makes_the_same_users_and_another_seed_others() {
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
    fn there_are_as_many_requests_as_was_said() {
        let settings = settings(1);
        let all = users(&settings);
        let conversations = all.iter().flat_map(|user| &user.conversations);
        let requests: usize = conversations.map(|it| it.turns.len()).sum();
        assert_eq!(requests as u64, settings.requests());
    }

    #[test]
    fn each_turn_extends_the_one_before() {
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
            dialogue.hear("so it is");
            before = messages;
        }
        // System prompt, three questions, and the answers to the first two.
        assert_eq!(before.len(), 6);
    }
}
