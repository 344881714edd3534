use super::*;

#[track_caller]
fn check(source: &str, context: Value, expected: &str) {
    let template = Template::new(source).unwrap();
    assert_eq!(template.render(context).as_deref(), Ok(expected));
}

fn format(source: &str) -> ContentFormat {
    Template::new(source).unwrap().format()
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
    for source in loops {
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
        "{% set ns.m = messages %}{% for m in messages %}{% for c in m.content %}{% endfor %}{% endfor %}",
    ];
    for source in prints {
        assert_eq!(format(source), String, "{source}");
    }
}
