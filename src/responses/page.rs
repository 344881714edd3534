//! Pagination of lists: query parameters and list objects. Pure.

use std::borrow::Cow;

use super::members::{self, Members, put, put_string};
use super::request;
use crate::openai::error::ApiError;
use crate::store::conversation::Order;

const LIMIT_DEFAULT: u32 = 20;
const LIMIT_MAX: u32 = 100;

/// The pagination parameters of a query.
#[derive(Debug, PartialEq)]
pub(super) struct Query {
    pub(super) after: Option<String>,
    pub(super) limit: u32,
    pub(super) order: Order,
}

impl Query {
    pub(super) fn read(query: &str) -> Result<Self, ApiError> {
        let mut read = Self {
            after: None,
            limit: LIMIT_DEFAULT,
            order: Order::NewestFirst,
        };
        for (name, value) in form_urlencoded::parse(query.as_bytes()) {
            match &*name {
                "after" if !value.is_empty() => read.after = Some(value.into_owned()),
                "limit" => {
                    let limit = value.parse().ok();
                    let limit = limit.filter(|limit| (1..=LIMIT_MAX).contains(limit));
                    read.limit = limit.ok_or_else(|| {
                        ApiError::wrong_value("limit", format!("it must be from 1 to {LIMIT_MAX}"))
                    })?;
                }
                "order" => {
                    read.order = match &*value {
                        "asc" => Order::OldestFirst,
                        "desc" => Order::NewestFirst,
                        _ => {
                            let why = "it must be 'asc' or 'desc'";
                            return Err(ApiError::wrong_value("order", why));
                        }
                    };
                }
                // `include`, checked below: everything that is stored is always in the list.
                _ => {}
            }
        }
        include(query)?;
        Ok(read)
    }
}

/// Reads `include`, also written as `include[]` as SDKs do. True if it asks for encrypted reasoning.
pub(super) fn include(query: &str) -> Result<bool, ApiError> {
    let mut has_encrypted_reasoning = false;
    let pairs = form_urlencoded::parse(query.as_bytes());
    let values = pairs.filter(|(name, _)| matches!(&**name, "include" | "include[]"));
    for (index, (_, value)) in values.enumerate() {
        request::check_include(&format!("include[{index}]"), &value)?;
        has_encrypted_reasoning |= value == "reasoning.encrypted_content";
    }
    Ok(has_encrypted_reasoning)
}

/// A boolean parameter of a query.
pub(super) fn flag(query: &str, name: &str) -> Result<bool, ApiError> {
    match parameter(query, name).as_deref() {
        None | Some("false") => Ok(false),
        Some("true") => Ok(true),
        Some(_) => Err(ApiError::wrong_type(name, "true or false")),
    }
}

pub(super) fn parameter<'q>(query: &'q str, name: &str) -> Option<Cow<'q, str>> {
    let mut pairs = form_urlencoded::parse(query.as_bytes());
    pairs.find(|(key, _)| key == name).map(|(_, value)| value)
}

/// One page of a stored list, as a list object.
pub(super) fn of_list(list: &[u8], query: &Query) -> Result<Vec<u8>, ApiError> {
    let mut items = members::list_of(list).unwrap_or_default();
    if query.order == Order::NewestFirst {
        items.reverse();
    }
    let mut begin = 0;
    if let Some(after) = &query.after {
        let position = items
            .iter()
            .position(|item| id(item).is_some_and(|id| id == **after));
        begin = 1 + position.ok_or_else(|| unknown_after(after))?;
    }
    let end = items.len().min(begin + query.limit as usize);
    Ok(of_items(&items[begin..end], end < items.len()))
}

pub(super) fn unknown_after(after: &str) -> ApiError {
    ApiError::wrong_value("after", format!("'{after}' is not an item of this list"))
}

/// A list object.
pub(super) fn of_items(items: &[&str], has_more: bool) -> Vec<u8> {
    let list = members::array(items.iter().map(|item| item.as_bytes()));
    let mut out = Vec::with_capacity(list.len() + 160);
    out.extend_from_slice(br#"{"object":"list","data":"#);
    out.extend_from_slice(&list);
    for (name, item) in [("first_id", items.first()), ("last_id", items.last())] {
        match item.and_then(|item| id(item)) {
            Some(id) => put_string(&mut out, name, &id),
            None => put(&mut out, name, "null"),
        }
    }
    out.extend_from_slice(format!(",\"has_more\":{has_more}}}").as_bytes());
    out
}

fn id(item: &str) -> Option<Cow<'_, str>> {
    Members::parse(item).ok()?.text("id")
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use serde_json::{Value, json};

    use super::*;

    fn items(count: usize) -> Vec<u8> {
        let items: Vec<Value> = (0..count)
            .map(|number| json!({"id": format!("i{number}")}))
            .collect();
        Value::from(items).to_string().into_bytes()
    }

    fn page(count: usize, query: &str) -> Result<Value, ApiError> {
        let page = of_list(&items(count), &Query::read(query)?)?;
        Ok(serde_json::from_slice(&page).unwrap())
    }

    #[test]
    fn a_page_is_the_newest_twenty_items_by_default() {
        let first = page(30, "").unwrap();
        assert_eq!(first["data"].as_array().unwrap().len(), 20);
        assert_eq!(
            (&first["first_id"], &first["last_id"]),
            (&json!("i29"), &json!("i10"))
        );
        assert_eq!(first["has_more"], true);
        let rest = page(30, "after=i10").unwrap();
        assert_eq!(
            (&rest["first_id"], &rest["has_more"]),
            (&json!("i9"), &json!(false))
        );
        let oldest = page(
            30,
            "order=asc&limit=1&include[]=message.input_image.image_url",
        )
        .unwrap();
        assert_eq!(oldest["data"], json!([{"id": "i0"}]));
        assert_eq!(
            page(0, "").unwrap(),
            json!({"object": "list", "data": [], "first_id": null, "last_id": null, "has_more": false})
        );
    }

    #[test]
    fn a_wrong_parameter_is_named_in_the_error() {
        for (query, param) in [
            ("limit=0", "limit"),
            ("limit=101", "limit"),
            ("limit=x", "limit"),
            ("order=up", "order"),
            ("after=i99", "after"),
            ("include[]=x", "include[0]"),
        ] {
            let error = page(3, query).unwrap_err();
            assert_eq!(
                (error.code, error.param_or_empty()),
                ("invalid_value", param)
            );
        }
    }

    proptest! {
        #[test]
        fn pages_together_are_the_whole_list(count in 0..60_usize, limit in 1..25_u32, is_ascending: bool) {
            let order = if is_ascending { "asc" } else { "desc" };
            let mut all: Vec<Value> = Vec::new();
            let mut after = String::new();
            loop {
                let page = page(count, &format!("order={order}&limit={limit}&after={after}")).unwrap();
                all.extend(page["data"].as_array().unwrap().iter().cloned());
                if page["has_more"] == false {
                    break;
                }
                after = page["last_id"].as_str().unwrap().to_owned();
            }
            let mut expected: Vec<Value> = serde_json::from_slice(&items(count)).unwrap();
            if !is_ascending {
                expected.reverse();
            }
            prop_assert_eq!(all, expected);
        }
    }
}
