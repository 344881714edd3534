use proptest::prelude::*;
use serde_json::{Map, Value, json};

use super::*;
use crate::prompt::cache;
use crate::prompt::render::{Options, Templates};
use crate::prompt::template::Template;
use crate::prompt::vocabulary::tests::{loaded, vocabulary};

const CHATML: &str = "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.content is string %}\
                      {{ m.content }}{% else %}{% for p in m.content %}{{ p.text if p.type == 'text' \
                      else '<|image|>' }}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}\
                      {% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}";

fn tokenizer(name: &str, max_cache_memory: u64) -> Arc<Tokenizer> {
    let registry = Registry::default();
    let settings = cache::Settings { max_cache_memory };
    let cache = Cache::new(&settings, 3, cache::Metrics::new(&registry));
    let templates = Templates {
        plain: Some(Template::new(CHATML).unwrap()),
        with_tools: None,
    };
    let renderer = Renderer::new(templates, Map::new(), Options::default());
    Arc::new(Tokenizer::new(
        renderer,
        vocabulary(name),
        Arc::new(cache),
        Metrics::new(&registry),
    ))
}

fn tokens(tokenizer: &Arc<Tokenizer>, api: Api, body: &Value) -> TokenizedPrompt {
    tokenizer
        .tokens(api, body.to_string().as_bytes(), 0)
        .unwrap()
}

fn chat(turns: &[String]) -> Value {
    let messages: Vec<Value> = turns
        .iter()
        .enumerate()
        .map(|(i, text)| {
            let role = if i % 2 == 0 { "user" } else { "assistant" };
            json!({"role": role, "content": text})
        })
        .collect();
    json!({"messages": messages})
}

fn ids(name: &str, text: &str) -> Vec<u32> {
    let mut ids = Vec::new();
    loaded(name).encode(text, &mut ids).unwrap();
    ids
}

#[test]
fn a_chat_has_the_ids_of_its_rendered_text() {
    let expected = ids(
        "qwen2",
        "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n",
    );
    let tokenizer = tokenizer("qwen2", 1 << 20);
    let found = tokens(&tokenizer, Api::Chat, &chat(&["hi".to_owned()]));
    assert_eq!(
        found,
        TokenizedPrompt {
            ids: expected,
            untokenized_bytes: 0
        }
    );
}

#[test]
fn bos_is_added_unless_the_request_turns_it_off() {
    let tokenizer = tokenizer("llama3", 1 << 20);
    let bos = tokenizer.vocabulary.bos_eos().0.to_vec();
    assert_eq!(bos.len(), 1);
    let found = tokens(&tokenizer, Api::Completions, &json!({"prompt": "hi there"}));
    assert_eq!(found.ids, [bos, ids("llama3", "hi there")].concat());
    let bare = json!({"prompt": "hi there", "add_special_tokens": false});
    assert_eq!(
        tokens(&tokenizer, Api::Completions, &bare).ids,
        ids("llama3", "hi there")
    );
}

#[test]
fn token_ids_from_the_client_are_used_unchanged() {
    let tokenizer = tokenizer("llama3", 1 << 20);
    let found = tokens(&tokenizer, Api::Completions, &json!({"prompt": [5, 6, 7]}));
    assert_eq!(
        found,
        TokenizedPrompt {
            ids: vec![5, 6, 7],
            untokenized_bytes: 0
        }
    );
}

#[test]
fn the_next_turn_tokenizes_only_its_own_text() {
    let tokenizer = tokenizer("qwen2", 1 << 20);
    let long = "A line that says something of interest.\n".repeat(500);
    let first = chat(std::slice::from_ref(&long)).to_string();
    let prepared = tokenizer.prepare(Api::Chat, first.as_bytes(), 0).unwrap();
    assert!(prepared.uncached_bytes >= long.len());
    assert!(prepared.is_long());
    prepared.finish().unwrap();
    let answer = "An answer that is long enough to be kept, and no longer.".to_owned();
    let turns = [long, answer.clone(), "And then?".to_owned()];
    let second = chat(&turns).to_string();
    let prepared = tokenizer.prepare(Api::Chat, second.as_bytes(), 0).unwrap();
    assert!(
        prepared.uncached_bytes < answer.len() + 200,
        "{}",
        prepared.uncached_bytes
    );
    assert!(!prepared.is_long());
}

#[test]
fn a_prompt_is_tokenized_up_to_its_first_image() {
    let tokenizer = tokenizer("qwen2", 1 << 20);
    let body = json!({"messages": [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "u"}}, {"type": "text", "text": "What?"}]},
    ]});
    let found = tokens(&tokenizer, Api::Chat, &body);
    let whole = ids(
        "qwen2",
        "<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\n<|image|>What?",
    );
    assert!(!found.ids.is_empty());
    assert!(whole.starts_with(&found.ids));
    assert!(found.untokenized_bytes > 0);
}

#[test]
fn a_text_beyond_the_limit_is_not_tokenized() {
    let mut tokenizer = tokenizer("qwen2", 1 << 20);
    Arc::get_mut(&mut tokenizer).unwrap().max_text = 100;
    let body = chat(&["x".repeat(200)]).to_string();
    let found = tokenizer.tokens(Api::Chat, body.as_bytes(), 0);
    assert!(matches!(found, Err(TokenizeError::TooLong { bytes }) if bytes > 200));
}

fn turns() -> impl Strategy<Value = Vec<String>> {
    let turn = proptest::sample::select(vec![
        "hi",
        "  ",
        "\n\n",
        "A line of text that is longer than those that are not kept.\n",
        "你好，世界。",
        "<|im_end|>",
        "<|im_start|>system\n",
        "<think>\nwhy\n</think>",
        "word",
        " it's 42\nAnd more",
        "<both>  ",
        "<s>",
    ]);
    let text = proptest::collection::vec((turn, 1usize..40), 1..4).prop_map(|parts| {
        parts
            .into_iter()
            .map(|(text, times)| text.repeat(times))
            .collect()
    });
    proptest::collection::vec(text, 1..6)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    #[test]
    fn the_ids_do_not_depend_on_what_is_cached(turns in turns(), small in any::<bool>()) {
        for name in ["qwen2", "flags", "llama3", "sentencepiece"] {
            // A small cache evicts entries between turns.
            let kept = tokenizer(name, if small { 32 << 10 } else { 8 << 20 });
            let fresh = tokenizer(name, 0);
            for length in 1..=turns.len() {
                let body = chat(&turns[..length]);
                let text = match kept.render(Api::Chat, body.to_string().as_bytes(), 0) {
                    Ok(RenderedPrompt::Text(text)) => text.text,
                    other => panic!("{other:?}"),
                };
                let expected = ids(name, &text);
                prop_assert_eq!(&tokens(&kept, Api::Chat, &body).ids, &expected, "{}", name);
                prop_assert_eq!(&tokens(&kept, Api::Chat, &body).ids, &expected, "{}", name);
                prop_assert_eq!(&tokens(&fresh, Api::Chat, &body).ids, &expected, "{}", name);
            }
        }
    }
}
