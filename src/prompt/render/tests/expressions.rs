//! Expressions of templates, beside what Python's Jinja prints.

use super::*;

/// What Python prints and we refuse: no template of the corpus needs it, and a refusal is never a wrong text.
const REFUSED: &[&str] = &[
    "{{ big * big }}",
    "{{ huge + 1 }}",
    "{{ huge % 7 }}",
    "{{ huge // 10 }}",
    "{{ +1 }}",
    "{{ +int }}",
    "{{ 'a' * -1 }}",
    "{{ [0] * -1 }}",
    "{{ 10 ** 40 }}",
    "{{ 2 ** 127 }}",
    "{{ 2 ** 128 }}",
    "{{ 2 ** 200 }}",
    "{{ '%a' % 'é' }}",
    "{{ '{!r}'.format('a') }}",
    "{{ '{:%}'.format(0.25) }}",
    "{{ text.swapcase() }}",
    "{{ text.casefold() }}",
    "{{ words.casefold() }}",
    "{{ words.swapcase() }}",
    "{{ '٣'.isdecimal() }}",
    "{{ 'Ab'.istitle() }}",
    "{{ 'a_1'.isidentifier() }}",
    "{{ '\\n'.isprintable() }}",
    "{{ 'Hello World'.istitle() }}",
    "{{ 'abc'.encode() }}",
    "{{ 'abc'.translate({97: 'x'}) }}",
    "{{ 'abc'.maketrans('a', 'b') }}",
    "{{ 7.bit_length() }}",
    "{{ int.bit_length() }}",
    "{{ '{x}'.format_map({'x': 1}) }}",
    "{{ dict.fromkeys(['a'], 1) }}",
    "{{ text | wordwrap(5) }}",
    "{{ 'a long line of words' | wordwrap(8) }}",
    "{{ 'a long line of words' | wordwrap(8, wrapstring='|') }}",
    "{{ html | striptags }}",
    "{{ {'a': 1, 'b': 'x y'} | urlencode }}",
    "{{ map | xmlattr }}",
    "{{ 1234567 | filesizeformat }}",
    "{{ 1000 | filesizeformat }}",
    "{% for a, b in ['xy'] %}{{ a }}{{ b }}{% endfor %}",
    "{% macro m(a) %}{{ varargs }}{{ kwargs }}{% endmacro %}{{ m(1, 2, 3, x=4) }}",
    "{% autoescape true %}{{ html }}{% endautoescape %}",
    "{{ 1, 2 }}",
];

/// What we print otherwise than Python: the insides of views, ranges, namespaces and macros, an index that is no integer.
const DIFFERENT: &[&str] = &[
    "{{ range(3) }}",
    "{{ map.items() }}",
    "{{ map.keys() }}",
    "{{ map.values() }}",
    "{{ list[1.0] }}",
    "{{ map.keys()[0] }}",
    "{{ map.keys() == ['b', 'a', 'C'] }}",
    "{{ map.items()[0] }}",
    "{{ map.keys() is sequence }}",
    "{{ true > 0 }}",
    "{{ text.upper is callable }}",
    "{{ text.upper is defined }}",
    "{{ self is defined }}",
    "{{ [1, 1.0, true, 'a', 'A'] | unique | list }}",
    "{{ objects | groupby('v') | list }}",
    "{% set ns = namespace(a=1) %}{{ ns }}",
    "{% macro m() %}{% endmacro %}{{ m.name }}{{ m.arguments }}",
    "{{ joiner }}",
    "{% set c = cycler('a', 'b') %}{{ c.next() }}{{ c.next() }}{{ c.current }}",
    "{{ lipsum is defined }}",
    "{% raw %}\n a {% endraw %}\nb",
];

#[test]
fn expressions_print_what_python_prints() {
    let recorded = include_bytes!("../../../../tests/fixtures/templates/expressions.json");
    let recorded: Value = serde_json::from_slice(&exact_integers::marked(recorded)).unwrap();
    let case = json!({
        "messages": [{"role": "user", "content": "Hi!"}],
        "kwargs": recorded["given"],
    });
    let now_s = recorded["now_s"].as_i64();
    let (mut refused, mut different) = (Vec::new(), Vec::new());
    let mut wrong = Vec::new();
    let kinds = recorded["expressions"].as_object().unwrap().values();
    for pair in kinds.flat_map(|pairs| pairs.as_array().unwrap()) {
        let source = pair[0].as_str().unwrap();
        // What Python refuses is no prompt of the engine, whatever we print.
        let Some(expected) = pair[1].as_str() else {
            continue;
        };
        let found = match Template::new(source) {
            Ok(_) => reference(&renderer(source), &case, now_s, Message::from)
                .map_err(|error| error.to_string()),
            Err(error) => Err(error.to_string()),
        };
        match &found {
            Ok(found) if found == expected => continue,
            Ok(_) => different.push(source),
            Err(_) => refused.push(source),
        }
        if !REFUSED.contains(&source) && !DIFFERENT.contains(&source) {
            wrong.push(format!("{source:?}\n  {found:?}\n  {expected:?}"));
        }
    }
    assert!(
        wrong.is_empty(),
        "{} differ:\n{}",
        wrong.len(),
        wrong.join("\n")
    );
    assert_eq!(refused, REFUSED);
    assert_eq!(different, DIFFERENT);
}
