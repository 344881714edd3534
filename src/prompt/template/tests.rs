use super::*;

#[track_caller]
fn check(source: &str, context: Value, expected: &str) {
    let template = Template::new(source).unwrap();
    assert_eq!(template.render(context).as_deref(), Ok(expected));
}

fn format(source: &str) -> ContentFormat {
    Template::new(source).unwrap().format
}

#[test]
fn tojson_writes_like_json_dumps() {
    check(
        "{{ x | tojson }}",
        minijinja::context! { x => vec![1e20, 0.1, 1e-7, 100000.0, -0.0, 1.5e300, 12345678.9] },
        "[1e+20, 0.1, 1e-07, 100000.0, -0.0, 1.5e+300, 12345678.9]",
    );
    check(
        "{{ x | tojson }} {{ x | tojson(ensure_ascii=true) }}",
        minijinja::context! { x => "\u{7f}<é>\u{1f600}\u{1}\u{2028}\\\"\u{8}" },
        "\"\u{7f}<é>\u{1f600}\\u0001\u{2028}\\\\\\\"\\b\" \
         \"\\u007f<\\u00e9>\\ud83d\\ude00\\u0001\\u2028\\\\\\\"\\b\"",
    );
    check(
        "{{ {'b': [], 'a': {}, 'c': [1, [2]]} | tojson(indent=1) }}",
        Value::UNDEFINED,
        "{\n \"b\": [],\n \"a\": {},\n \"c\": [\n  1,\n  [\n   2\n  ]\n ]\n}",
    );
    check(
        "{{ {'b': 1, 'a': 2} | tojson(sort_keys=true, separators=(',', ':')) }}",
        Value::UNDEFINED,
        r#"{"a":2,"b":1}"#,
    );
}

#[test]
fn an_undefined_value_is_not_json() {
    let template = Template::new("{{ x | tojson }}").unwrap();
    assert!(template.render(Value::UNDEFINED).is_err());
}

#[test]
fn none_is_not_iterable_and_undefined_is_empty() {
    check(
        "{{ none is iterable }} {{ x is iterable }} {{ 1 is iterable }} {{ 'a' is iterable }} {{ {} is iterable }}",
        Value::UNDEFINED,
        "False True False True True",
    );
    check(
        "{% for k, v in x | items %}{{ k }}{% endfor %}.{% for k, v in {'a': 1} | items %}{{ k }}={{ v }}{% endfor %}",
        Value::UNDEFINED,
        ".a=1",
    );
    assert!(
        Template::new("{{ 1 | items }}")
            .unwrap()
            .render(Value::UNDEFINED)
            .is_err()
    );
}

#[test]
fn numbers_are_texts_as_python_writes_them_wherever_they_are_printed() {
    let numbers = || {
        let number = |float: f64| Value::from(float);
        let huge = number::of_digits("1180591620717411303424");
        let vast = number::of_digits(&("1".to_owned() + &"0".repeat(45)));
        Value::from(vec![
            number(1e-7),
            number(1e20),
            number(2.5),
            number(3.0),
            huge,
            vast,
        ])
    };
    let context = || Value::from_pairs([("x", numbers())]);
    let list = format!(
        "1e-07, 1e+20, 2.5, 3.0, 1180591620717411303424, 1{}",
        "0".repeat(45)
    );
    check("{{ x | join(', ') }}", context(), &list);
    check("{{ x }}", context(), &format!("[{list}]"));
    check("{{ x | tojson }}", context(), &format!("[{list}]"));
    check(
        "{{ x[0] ~ '' ~ x[1] }} {{ x[0] | string }} {{ x[4] ~ 1 }}",
        context(),
        "1e-071e+20 1e-07 11805916207174113034241",
    );
    check(
        "{{ {'a': x[0]} }} {{ '%s' % x[0] }}",
        context(),
        "{'a': 1e-07} 1e-07",
    );
    check(
        "{% for n in x %}{{ n is number }}{{ n is float }}{{ n is integer }} {% endfor %}{{ true is number }}{{ true is integer }}",
        context(),
        "TrueTrueFalse TrueTrueFalse TrueTrueFalse TrueTrueFalse TrueFalseTrue TrueFalseTrue TrueFalse",
    );
}

#[test]
fn texts_have_the_methods_and_filters_of_python() {
    let of = |source: &str, expected: &str| check(source, Value::UNDEFINED, expected);
    of(
        "{{ 'a.b.c'.rsplit('.', 1) }} {{ ' a  b c '.rsplit(none, 1) }} {{ ' a  b '.rsplit() }}",
        "['a.b', 'c'] [' a  b', 'c'] ['a', 'b']",
    );
    of(
        "{{ 'abc'.removeprefix('a') }} {{ 'abc'.removesuffix('c') }} {{ 'abc'.removeprefix('x') }}",
        "bc ab abc",
    );
    of(
        "{{ 'a-b-c'.partition('-')[2] }} {{ 'a-b-c'.rpartition('-')[0] }} {{ 'größe'.index('e') }} {{ '-7'.zfill(4) }}",
        "b-c a-b 4 -007",
    );
    of(
        "{{ 'a\n\nb\n' | indent(2) }}|{{ 'a\nb' | indent(2, first=true) }}|{{ 'a\n\nb' | indent('>', true, true) }}",
        "a\n\n  b\n|  a\n  b|>a\n>\n>b",
    );
    of(
        "{{ x | first }}{{ x | last }}{{ [1, 2] | first }}{{ [1, 2] | last }}{{ '<\"a\">' | e }}",
        "12&lt;&#34;a&#34;&gt;",
    );
    of(
        "[{{ 'abc' | center(8) }}]{{ 'a b  c' | wordcount }} {{ x is callable }}",
        "[  abc   ]3 False",
    );
}

#[test]
fn what_is_empty_is_empty_backwards() {
    check(
        "{{ x[::-1] }}{{ ''[::-1] }}{{ ()[::-1] }}{{ range(0)[::-1] }}",
        Value::from_pairs([("x", Value::from(Vec::<Value>::new()))]),
        "[]()[]",
    );
}

#[test]
fn an_error_names_the_line_in_the_source() {
    let line = |source: &str| {
        let rendered = Template::new(source).unwrap().render(Value::UNDEFINED);
        rendered.unwrap_err().0
    };
    let error = line("a\n{% if true %}\n\n{{ 1 % 0 }}\n{% endif %}");
    assert!(error.ends_with("(line 4)"), "{error}");
    let error = line("{#\n\n#}\n{%- for x in [1] %}\n  {{- x -}}\n\n  {{ x.y.z }}{% endfor %}");
    assert!(
        error.contains(":7") || error.ends_with("(line 7)"),
        "{error}"
    );
}

#[test]
fn raise_exception_returns_its_message() {
    let template = Template::new("{{ raise_exception('Roles must alternate!') }}").unwrap();
    let error = template.render(Value::UNDEFINED).unwrap_err();
    assert!(error.0.contains("Roles must alternate!"), "{error}");
}

#[test]
fn a_syntax_error_names_the_line() {
    let error = Template::new("a\n{% if %}").unwrap_err();
    assert!(error.0.contains('2'), "{error}");
}

#[test]
fn strftime_now_uses_the_time_of_the_request() {
    check(
        "{{ strftime_now('%d %b %Y, %B %A %H:%M') }}",
        Value::from_pairs([(now_key(), Value::from(1_767_323_045_i64))]),
        "02 Jan 2026, January Friday 03:04",
    );
}

#[test]
fn blocks_are_trimmed() {
    check(
        "a\n  {% if true %}\n  b\n  {%- endif %}\n c\n  {# d #}\n",
        Value::UNDEFINED,
        "a\n  b c\n",
    );
}

#[test]
fn generation_tags_only_open_a_scope() {
    check(
        "{% set x = 1 %}{%- generation -%} {% set x = 2 %}{{ x }} {%- endgeneration %} {{ x }}",
        Value::UNDEFINED,
        "2 1",
    );
    check("{{ '{% generation' }}", Value::UNDEFINED, "{% generation");
}

#[test]
fn a_loop_over_the_content_means_parts() {
    use ContentFormat::Openai;
    let loops = [
        "{% for m in messages %}{% for c in m.content %}{% endfor %}{% endfor %}",
        "{% for m in messages[1:] %}{% for c in m['content'] | list %}{% endfor %}{% endfor %}",
        "{% set l = messages[1:] %}{% set k = l %}{% for m in k %}{% for c in m.content %}{% endfor %}{% endfor %}",
        "{% for m in messages %}{% set content = m.content %}{% for c in content %}{% endfor %}{% endfor %}",
        "{% macro f(x, y) %}{% for c in y %}{% endfor %}{% endmacro %}{% for m in messages %}{{ f(1, m.content) }}{% endfor %}",
        "{% macro f(y) %}{% for c in y %}{% endfor %}{% endmacro %}{% for m in messages %}{{ 'a' ~ f(y=m.content) | trim }}{% endfor %}",
    ];
    // The engine follows namespaces since 0.33.
    let namespaces = [
        "{% set ns.m = messages %}{% for m in messages %}{% for c in m.content %}{% endfor %}{% endfor %}",
        "{% set ns = namespace(l=messages, x=1) %}{% for m in ns.l %}{% for c in m.content %}{% endfor %}{% endfor %}",
        "{% set ns = namespace(x=1) %}{% set ns.l = messages[1:] %}{% for m in ns.l %}{% for c in m.content %}{% endfor %}{% endfor %}",
        "{% set ns = namespace(l=messages) %}{% set k = ns.l %}{% for m in k[1:] %}{% for c in m.content %}{% endfor %}{% endfor %}",
    ];
    for source in loops.into_iter().chain(namespaces) {
        assert_eq!(format(source), Openai, "{source}");
    }
}

#[test]
fn a_template_that_prints_the_content_gets_a_text() {
    use ContentFormat::String;
    let prints = [
        "{% for m in messages %}{{ m.content }}{% endfor %}",
        "{% for t in tools %}{% for c in t.content %}{% endfor %}{% endfor %}",
        "{% macro f(content) %}{% for c in content %}{% endfor %}{% endmacro %}{% for m in messages %}{{ f(m.tools) }}{% endfor %}",
        // Two names at once: the engine gives up.
        "{% for a, b in messages %}{% for c in a.content %}{% endfor %}{% endfor %}",
        "{% set ns = namespace(l=messages) %}{% for m in ns.k %}{% for c in m.content %}{% endfor %}{% endfor %}",
        "{% set ns = namespace(l=tools) %}{% for m in ns.l %}{% for c in m.content %}{% endfor %}{% endfor %}",
    ];
    for source in prints {
        assert_eq!(format(source), String, "{source}");
    }
}
