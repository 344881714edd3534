//! A message of a conversation. Most have a role and one text and nothing else: these are kept as the two texts, borrowed
//! from the request where that is possible. All others are JSON objects.

use std::borrow::Cow;

use serde::de::{Deserialize, Deserializer};
use serde_json::{Map, Value, json};

use crate::json_scan::Scan;

/// A message, as a client sent it or as the template gets it.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Message<'a> {
    Plain(PlainMessage<'a>),
    Object(Map<String, Value>),
}

/// A message without any other key.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct PlainMessage<'a> {
    pub(super) role: Cow<'a, str>,
    pub(super) content: PlainContent<'a>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum PlainContent<'a> {
    Text(Cow<'a, str>),
    /// A list of one part of the type `text`, or an empty one.
    List(Option<Cow<'a, str>>),
}

impl<'a> PlainContent<'a> {
    pub(super) fn into_text(self) -> Cow<'a, str> {
        match self {
            PlainContent::Text(text) => text,
            PlainContent::List(part) => part.unwrap_or_default(),
        }
    }
}

impl From<PlainContent<'_>> for Value {
    fn from(content: PlainContent<'_>) -> Self {
        match content {
            PlainContent::Text(text) => text.into(),
            PlainContent::List(part) => {
                let part = part.map(|text| json!({"type": "text", "text": text}));
                part.into_iter().collect()
            }
        }
    }
}

impl<'a> Message<'a> {
    /// The message that begins here. A plain one without escapes is not parsed.
    pub(super) fn scan(scan: &mut Scan<'a, true>) -> Option<Self> {
        let (mut role, mut content) = (None, None);
        let mut is_plain = true;
        let begin = scan.rest();
        scan.each_member(|scan, name| {
            let text = match &*name {
                "role" => &mut role,
                "content" => &mut content,
                _ => {
                    is_plain = false;
                    return scan.value().map(drop);
                }
            };
            *text = match scan.first_byte()? {
                b'"' => Some(scan.text()?),
                _ => scan.value().and(None),
            };
            is_plain &= text.is_some();
            Some(())
        })?;
        if let (true, Some(role), Some(content)) = (is_plain, role, content) {
            let content = PlainContent::Text(content);
            return Some(Message::Plain(PlainMessage { role, content }));
        }
        let json = begin.get(..begin.len() - scan.rest().len())?;
        serde_json::from_str(json).ok()
    }
}

impl Message<'_> {
    pub(super) fn has_role(&self, role: &str) -> bool {
        match self {
            Message::Plain(message) => message.role == role,
            Message::Object(message) => message.get("role").is_some_and(|own| own == role),
        }
    }

    pub(super) fn into_object(self) -> Map<String, Value> {
        match self {
            Message::Plain(message) => {
                let mut object = Map::with_capacity(2);
                object.insert("role".to_owned(), message.role.into());
                object.insert("content".to_owned(), message.content.into());
                object
            }
            Message::Object(object) => object,
        }
    }
}

impl From<Map<String, Value>> for Message<'_> {
    fn from(mut object: Map<String, Value>) -> Self {
        let is_plain = object.len() == 2
            && ["role", "content"]
                .iter()
                .all(|key| object.get(*key).is_some_and(Value::is_string));
        let mut text = |key| match object.get_mut(key) {
            Some(Value::String(text)) => Cow::Owned(std::mem::take(text)),
            _ => Cow::default(),
        };
        if is_plain {
            Message::Plain(PlainMessage {
                role: text("role"),
                content: PlainContent::Text(text("content")),
            })
        } else {
            Message::Object(object)
        }
    }
}

impl<'de: 'a, 'a> Deserialize<'de> for Message<'a> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        Map::deserialize(deserializer).map(Self::from)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn is_plain(json: &str) -> bool {
        let message: Message<'_> = serde_json::from_str(json).unwrap();
        matches!(message, Message::Plain(_))
    }

    #[test]
    fn a_message_of_a_role_and_a_text_is_plain() {
        assert!(is_plain(r#"{"content":"a \"b\"","role":"user"}"#));
        assert!(!is_plain(r#"{"role":"user","content":"a","name":"b"}"#));
        assert!(!is_plain(r#"{"role":"user","content":null}"#));
        assert!(!is_plain(r#"{"role":"user"}"#));
    }

    fn member() -> impl Strategy<Value = (String, String)> {
        let key = prop_oneof![
            Just(r#""role""#),
            Just(r#""content""#),
            Just(r#""\u0072ole""#),
            Just(r#""name""#)
        ];
        let value = prop_oneof![
            Just(r#""a""#),
            Just(r#""\n\u00e9""#),
            Just("null"),
            Just("true"),
            Just("-1"),
            Just("1e3"),
            Just("18446744073709551615"),
            Just(r#"[{"type":"text","text":"a"},1]"#),
            Just(r#"{"a":[]}"#)
        ];
        (key, value).prop_map(|(key, value)| (key.to_owned(), value.to_owned()))
    }

    proptest! {
        #[test]
        fn it_has_what_an_object_of_the_same_json_has(members in proptest::collection::vec(member(), 0..5)) {
            let members: Vec<_> = members.iter().map(|(key, value)| format!("{key}: {value}")).collect();
            let json = format!("{{{}}}", members.join(", "));
            let object: Map<String, Value> = serde_json::from_str(&json).unwrap();
            let message: Message<'_> = serde_json::from_str(&json).unwrap();
            if let Some(scanned) = Message::scan(&mut Scan::new(&json)) {
                prop_assert_eq!(&scanned, &message);
            }
            prop_assert_eq!(&message.into_object(), &object);
            let value = Message::deserialize(Value::from(object.clone())).unwrap();
            prop_assert_eq!(&value.into_object(), &object);
            prop_assert_eq!(&Message::from(object.clone()).into_object(), &object);
        }
    }
}
