//! Random operations on the table against the plainest model of one: a list.

use proptest::prelude::*;

use super::*;

const TENANTS: u64 = 2;
const IDS: &[&str] = &["a", "b", "c", "d"];
const VALUES: &[&[u8]] = &[b"", b"x", b"y"];

#[derive(Clone, Debug)]
enum Step {
    Insert(DocumentKey, NewDocument, DocumentBounds),
    Replace(DocumentKey, u64, Bytes, Option<u64>),
    Remove(DocumentKey, Option<u64>),
    List(Collection, Tenant, DocumentPage),
    Due(Collection, u64, usize),
}

fn collection() -> impl Strategy<Value = Collection> {
    proptest::sample::select(Collection::ALL.to_vec())
}

fn tenant() -> impl Strategy<Value = Tenant> {
    (0..TENANTS).prop_map(Tenant::tagged)
}

fn id() -> impl Strategy<Value = String> {
    proptest::sample::select(IDS).prop_map(str::to_owned)
}

fn key() -> impl Strategy<Value = DocumentKey> {
    (collection(), tenant(), id()).prop_map(|(collection, tenant, id)| DocumentKey {
        collection,
        tenant,
        id,
    })
}

fn value() -> impl Strategy<Value = Bytes> {
    proptest::sample::select(VALUES).prop_map(Bytes::from_static)
}

fn due_ms() -> impl Strategy<Value = Option<u64>> {
    proptest::option::of(0..5_u64)
}

fn page() -> impl Strategy<Value = DocumentPage> {
    let order = prop_oneof![Just(Order::OldestFirst), Just(Order::NewestFirst)];
    (proptest::option::of(id()), 0..4_usize, order).prop_map(|(after, limit, order)| DocumentPage {
        after,
        limit,
        order,
    })
}

fn insert() -> impl Strategy<Value = Step> {
    let new = (value(), 0..3_u64, 0..4_u64, due_ms());
    let new = new.prop_map(|(value, created_ms, weight, due_ms)| NewDocument {
        value,
        created_ms,
        weight,
        due_ms,
    });
    let bounds = (1..5_u64, prop_oneof![3..8_u64, Just(u64::MAX)]);
    let bounds = bounds.prop_map(|(documents, weight)| DocumentBounds { documents, weight });
    (key(), new, bounds).prop_map(|(key, new, bounds)| Step::Insert(key, new, bounds))
}

fn step() -> impl Strategy<Value = Step> {
    let replace = (key(), 1..4_u64, value(), due_ms());
    let remove = (key(), proptest::option::of(1..4_u64));
    let list = (collection(), tenant(), page());
    let due = (collection(), 0..5_u64, 0..6_usize);
    prop_oneof![
        4 => insert(),
        4 => replace.prop_map(|(key, version, value, due)| Step::Replace(key, version, value, due)),
        1 => remove.prop_map(|(key, version)| Step::Remove(key, version)),
        3 => list.prop_map(|(collection, tenant, page)| Step::List(collection, tenant, page)),
        2 => due.prop_map(|(collection, now_ms, max)| Step::Due(collection, now_ms, max)),
    ]
}

#[derive(Clone, Debug)]
struct Row {
    inserted: Bytes,
    document: Document,
    created_ms: u64,
    weight: u64,
    due_ms: Option<u64>,
}

#[derive(Debug, Default)]
struct Model(Vec<Row>);

impl Model {
    fn row(&mut self, key: &DocumentKey) -> Option<&mut Row> {
        self.0.iter_mut().find(|row| row.document.key == *key)
    }

    /// Oldest first.
    fn of(&self, collection: Collection, tenant: Tenant) -> Vec<&Row> {
        let is_of = |row: &&Row| {
            let key = &row.document.key;
            (key.collection, key.tenant) == (collection, tenant)
        };
        let mut rows: Vec<&Row> = self.0.iter().filter(is_of).collect();
        rows.sort_by_key(|row| (row.created_ms, row.document.key.id.clone()));
        rows
    }

    fn insert(
        &mut self,
        key: DocumentKey,
        new: NewDocument,
        bounds: DocumentBounds,
    ) -> InsertOutcome {
        if let Some(row) = self.row(&key) {
            return if row.inserted == new.value {
                InsertOutcome::Done
            } else {
                InsertOutcome::Exists
            };
        }
        let rows = self.of(key.collection, key.tenant);
        if rows.len() as u64 + 1 > bounds.documents {
            return InsertOutcome::TooMany;
        }
        let weight: u64 = rows.iter().map(|row| row.weight).sum();
        if weight + new.weight > bounds.weight {
            return InsertOutcome::TooHeavy;
        }
        self.0.push(Row {
            inserted: new.value.clone(),
            document: Document {
                key,
                version: 1,
                value: new.value,
            },
            created_ms: new.created_ms,
            weight: new.weight,
            due_ms: new.due_ms,
        });
        InsertOutcome::Done
    }

    fn replace(
        &mut self,
        key: &DocumentKey,
        version: u64,
        value: Bytes,
        due_ms: Option<u64>,
    ) -> ReplaceOutcome {
        let Some(row) = self.row(key) else {
            return ReplaceOutcome::Gone;
        };
        if row.document.version != version {
            return ReplaceOutcome::Changed;
        }
        row.document.version += 1;
        row.document.value = value;
        row.due_ms = due_ms;
        ReplaceOutcome::Done(row.document.version)
    }

    fn remove(&mut self, key: &DocumentKey, version: Option<u64>) -> RemoveOutcome {
        let Some(row) = self.row(key) else {
            return RemoveOutcome::Gone;
        };
        if version.is_some_and(|version| version != row.document.version) {
            return RemoveOutcome::Changed;
        }
        self.0.retain(|row| row.document.key != *key);
        RemoveOutcome::Done
    }

    fn list(&self, collection: Collection, tenant: Tenant, page: &DocumentPage) -> DocumentList {
        let mut rows = self.of(collection, tenant);
        if page.order == Order::NewestFirst {
            rows.reverse();
        }
        if let Some(after) = &page.after {
            let place = rows.iter().position(|row| row.document.key.id == *after);
            let Some(place) = place else {
                return DocumentList {
                    is_unknown: true,
                    ..DocumentList::default()
                };
            };
            rows.drain(..=place);
        }
        let documents = rows.iter().take(page.limit);
        DocumentList {
            documents: documents.map(|row| row.document.clone()).collect(),
            has_more: rows.len() > page.limit,
            is_unknown: false,
        }
    }

    fn due(&self, collection: Collection, now_ms: u64, places: Range<usize>) -> Vec<Document> {
        let is_due = |row: &&Row| {
            row.document.key.collection == collection
                && row.due_ms.is_some_and(|due_ms| due_ms <= now_ms)
        };
        let mut rows: Vec<&Row> = self.0.iter().filter(is_due).collect();
        rows.sort_by_key(|row| (row.due_ms, row.document.key.clone()));
        let found = rows.into_iter().skip(places.start).take(places.len());
        found.map(|row| row.document.clone()).collect()
    }
}

proptest! {
    #[test]
    fn the_table_does_what_a_list_does(steps in proptest::collection::vec(step(), 1..200)) {
        let (mut table, mut model) = (DocumentTable::default(), Model::default());
        for step in steps {
            match step {
                Step::Insert(key, new, bounds) => {
                    let expected = model.insert(key.clone(), new.clone(), bounds);
                    prop_assert_eq!(table.insert(key, new, bounds), expected);
                }
                Step::Replace(key, version, value, due_ms) => {
                    let replaced = table.replace(&key, version, &value, due_ms);
                    prop_assert_eq!(replaced, model.replace(&key, version, value, due_ms));
                }
                Step::Remove(key, version) => {
                    prop_assert_eq!(table.remove(&key, version), model.remove(&key, version));
                }
                Step::List(collection, tenant, page) => {
                    let listed = table.list(collection, tenant, &page);
                    prop_assert_eq!(listed, model.list(collection, tenant, &page));
                }
                Step::Due(collection, now_ms, end) => {
                    let places = end % 3..end;
                    let due = table.due(collection, now_ms, places.clone());
                    prop_assert_eq!(due, model.due(collection, now_ms, places));
                }
            }
            prop_assert_eq!(table.len(), model.0.len());
            for row in &model.0 {
                let found = table.find(row.document.key.clone());
                prop_assert_eq!(found.as_ref(), Some(&row.document));
            }
        }
        // Nothing is left of what is removed.
        for row in &model.0 {
            prop_assert_eq!(table.remove(&row.document.key, None), RemoveOutcome::Done);
        }
        prop_assert_eq!((table.len(), table.tenants.len(), table.due.len()), (0, 0, 0));
    }
}

#[test]
fn what_it_keeps_is_not_the_buffer_that_it_came_in() {
    let key = DocumentKey {
        collection: Collection::Files,
        tenant: Tenant::tagged(1),
        id: "a".to_owned(),
    };
    let large = Bytes::from(vec![b'x'; 1 << 20]);
    let mut table = DocumentTable::default();
    let new = NewDocument {
        value: large.slice(..10),
        created_ms: 0,
        weight: 0,
        due_ms: None,
    };
    let bounds = DocumentBounds {
        documents: 1,
        weight: 0,
    };
    assert_eq!(table.insert(key.clone(), new, bounds), InsertOutcome::Done);
    let replaced = table.replace(&key, 1, &large.slice(..10), None);
    assert_eq!(replaced, ReplaceOutcome::Done(2));
    assert!(large.is_unique());
}
