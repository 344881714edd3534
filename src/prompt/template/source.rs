//! Writes a template's source anew, with what Python does otherwise than the template engine as calls of the filters in
//! `operators`: `%`, `~`, slices, loops over texts, methods that are not called. Blocks are already trimmed in it. Pure.

use std::fmt::Write;

use minijinja::machinery::ast::{
    BinOpKind, Call, CallArg, Compare, CompareOpKind, Const, Expr, ForLoop, IfCond, Macro, Map,
    Slice, Stmt, UnaryOpKind,
};
use minijinja::value::ValueKind;

use super::operators;

/// How tightly an expression binds, from the loosest on.
mod level {
    pub(super) const ANY: u8 = 0;
    pub(super) const OR: u8 = 1;
    pub(super) const AND: u8 = 2;
    pub(super) const NOT: u8 = 3;
    pub(super) const COMPARISON: u8 = 4;
    pub(super) const SUM: u8 = 5;
    pub(super) const PRODUCT: u8 = 7;
    pub(super) const POWER: u8 = 8;
    /// A negation, or what has filters and tests.
    pub(super) const FILTERED: u8 = 9;
    pub(super) const NEGATED: u8 = 10;
    pub(super) const PRIMARY: u8 = 11;
}

/// The source of a tree, whose statements stand on the lines that they had.
pub(super) fn of(tree: &Stmt<'_>) -> String {
    let mut writer = Writer {
        out: String::new(),
        line: 1,
    };
    writer.statement(tree);
    writer.out
}

struct Writer {
    out: String,
    line: u16,
}

impl Writer {
    fn put(&mut self, text: &str) {
        let lines = text.bytes().filter(|byte| *byte == b'\n').count();
        let lines = u16::try_from(lines).unwrap_or(u16::MAX);
        self.line = self.line.saturating_add(lines);
        self.out.push_str(text);
    }

    /// Begins a tag on its line, so that errors name it.
    fn open(&mut self, tag: &str, line: u16) {
        self.put(tag);
        while self.line < line {
            self.put("\n");
        }
    }

    fn statements(&mut self, statements: &[Stmt<'_>]) {
        for statement in statements {
            self.statement(statement);
        }
    }

    fn statement(&mut self, statement: &Stmt<'_>) {
        match statement {
            Stmt::Template(template) => self.statements(&template.children),
            Stmt::EmitExpr(emitted) => {
                let mut parts = Vec::new();
                concatenated(&emitted.expr, &mut parts);
                for part in parts {
                    self.open("{{ ", emitted.span().start_line);
                    self.expression(part, level::ANY);
                    self.put(" }}");
                }
            }
            Stmt::EmitRaw(text) => self.text(text.raw),
            Stmt::ForLoop(each) => self.for_loop(each, each.span().start_line),
            Stmt::IfCond(condition) => {
                self.open("{% if ", condition.span().start_line);
                self.condition(condition);
            }
            Stmt::WithBlock(with) => {
                self.open("{% with ", with.span().start_line);
                for (number, (target, value)) in with.assignments.iter().enumerate() {
                    if number > 0 {
                        self.put(", ");
                    }
                    self.part_of_target(target);
                    self.put(" = ");
                    self.expression(value, level::ANY);
                }
                self.put(" %}");
                self.statements(&with.body);
                self.put("{% endwith %}");
            }
            Stmt::Set(set) => {
                self.open("{% set ", set.span().start_line);
                self.set_target(&set.target);
                self.put(" = ");
                self.expression(&set.expr, level::ANY);
                self.put(" %}");
            }
            Stmt::SetBlock(set) => {
                self.open("{% set ", set.span().start_line);
                self.set_target(&set.target);
                if let Some(filter) = &set.filter {
                    self.put(" | ");
                    self.filter_chain(filter);
                }
                self.put(" %}");
                self.statements(&set.body);
                self.put("{% endset %}");
            }
            Stmt::AutoEscape(escape) => {
                self.open("{{ ", escape.span().start_line);
                self.expression(&escape.enabled, level::FILTERED);
                let _ = write!(self.out, " | {} }}}}", operators::UNESCAPED);
                self.statements(&escape.body);
            }
            Stmt::FilterBlock(filtered) => {
                self.open("{% filter ", filtered.span().start_line);
                self.filter_chain(&filtered.filter);
                self.put(" %}");
                self.statements(&filtered.body);
                self.put("{% endfilter %}");
            }
            Stmt::Block(block) => {
                self.open("{% block ", block.span().start_line);
                self.put(block.name);
                self.put(" %}");
                self.statements(&block.body);
                self.put("{% endblock %}");
            }
            Stmt::Import(import) => self.other_template(import.span().start_line),
            Stmt::FromImport(import) => self.other_template(import.span().start_line),
            Stmt::Extends(extends) => self.other_template(extends.span().start_line),
            Stmt::Include(include) => self.other_template(include.span().start_line),
            Stmt::Macro(each) => {
                self.open("{% macro ", each.span().start_line);
                self.put(each.name);
                self.parameters(each);
                self.put("{% endmacro %}");
            }
            Stmt::CallBlock(block) => {
                self.open("{% call ", block.span().start_line);
                let late = self.parameter_list(&block.macro_decl);
                self.put(" ");
                self.call(&block.call);
                self.put(" %}");
                self.late_defaults(&late);
                self.statements(&block.macro_decl.body);
                self.put("{% endcall %}");
            }
            Stmt::Continue(_) => self.put("{% continue %}"),
            Stmt::Break(_) => self.put("{% break %}"),
            Stmt::Do(each) => {
                self.open("{% do ", each.span().start_line);
                self.call(&each.call);
                self.put(" %}");
            }
        }
    }

    fn text(&mut self, text: &str) {
        let is_plain = !["{{", "{%", "{#"].iter().any(|tag| text.contains(tag));
        // What ends with a brace would form a tag with what follows.
        if is_plain && !text.ends_with('{') {
            self.put(text);
        } else {
            self.put("{% raw %}");
            self.put(text);
            self.put("{% endraw %}");
        }
    }

    fn for_loop(&mut self, each: &ForLoop<'_>, line: u16) {
        self.open("{% for ", line);
        self.target(&each.target);
        self.put(" in ");
        self.expression(&each.iter, level::FILTERED);
        let _ = write!(self.out, " | {}", operators::ITERATED);
        if let Some(filter) = &each.filter_expr {
            self.put(" if ");
            self.expression(filter, level::OR);
        }
        if each.recursive {
            self.put(" recursive");
        }
        self.put(" %}");
        self.statements(&each.body);
        if !each.else_body.is_empty() {
            self.put("{% else %}");
            self.statements(&each.else_body);
        }
        self.put("{% endfor %}");
    }

    /// What stands after `if` or `elif`.
    fn condition(&mut self, condition: &IfCond<'_>) {
        self.expression(&condition.expr, level::OR);
        self.put(" %}");
        self.statements(&condition.true_body);
        match condition.false_body.as_slice() {
            [] => {}
            [Stmt::IfCond(other)] => {
                self.open("{% elif ", other.span().start_line);
                return self.condition(other);
            }
            other => {
                self.put("{% else %}");
                self.statements(other);
            }
        }
        self.put("{% endif %}");
    }

    /// Engines give templates nothing to load.
    fn other_template(&mut self, line: u16) {
        self.open("{{ raise_exception(", line);
        self.put("\"there is no other template\") }}");
    }

    /// The names of an assignment.
    fn target(&mut self, target: &Expr<'_>) {
        let items = match target {
            Expr::List(list) => &list.items,
            Expr::GetAttr(attribute) => {
                self.target(&attribute.expr);
                self.put(".");
                return self.put(attribute.name);
            }
            _ => return self.expression(target, level::PRIMARY),
        };
        for (number, item) in items.iter().enumerate() {
            if number > 0 {
                self.put(", ");
            }
            self.part_of_target(item);
        }
        if items.len() == 1 {
            self.put(", ");
        }
    }

    /// One name and a comma stand in parentheses, or the comma would have no end.
    fn set_target(&mut self, target: &Expr<'_>) {
        match target {
            Expr::List(list) if list.items.len() == 1 => self.part_of_target(target),
            _ => self.target(target),
        }
    }

    /// A name, or several in parentheses.
    fn part_of_target(&mut self, target: &Expr<'_>) {
        match target {
            Expr::List(_) => {
                self.put("(");
                self.target(target);
                self.put(")");
            }
            _ => self.target(target),
        }
    }

    /// A macro's parameters and body.
    fn parameters(&mut self, each: &Macro<'_>) {
        let late = self.parameter_list(each);
        self.put(" %}");
        self.late_defaults(&late);
        self.statements(&each.body);
    }

    /// Returns the defaults that are set in the body, because they may name other parameters.
    fn parameter_list<'e>(&mut self, each: &'e Macro<'e>) -> Vec<(&'e Expr<'e>, &'e Expr<'e>)> {
        let without = each.args.len() - each.defaults.len();
        let mut late = Vec::new();
        self.put("(");
        for (number, parameter) in each.args.iter().enumerate() {
            if number > 0 {
                self.put(", ");
            }
            self.expression(parameter, level::PRIMARY);
            let Some(default) = number.checked_sub(without).map(|at| &each.defaults[at]) else {
                continue;
            };
            self.put("=");
            if is_constant(default) {
                self.expression(default, level::ANY);
            } else {
                // There is no other way to write an undefined value in the middle of the list.
                let _ = write!(self.out, "none | {}", operators::UNDEFINED);
                late.push((parameter, default));
            }
        }
        self.put(")");
        late
    }

    fn late_defaults(&mut self, late: &[(&Expr<'_>, &Expr<'_>)]) {
        for (parameter, default) in late {
            self.put("{% if ");
            self.expression(parameter, level::PRIMARY);
            self.put(" is undefined() %}{% set ");
            self.expression(parameter, level::PRIMARY);
            self.put(" = ");
            self.expression(default, level::ANY);
            self.put(" %}{% endif %}");
        }
    }

    /// Filters of a block, whose value is not written.
    fn filter_chain(&mut self, chain: &Expr<'_>) {
        if let Expr::Filter(filter) = chain {
            if let Some(before) = &filter.expr {
                self.filter_chain(before);
                self.put(" | ");
            }
            self.put(filter.name);
            self.arguments(&filter.args);
        }
    }

    fn call(&mut self, call: &Call<'_>) {
        match &call.expr {
            // A method that is called needs no value of its own.
            Expr::GetAttr(method) => {
                self.expression(&method.expr, level::PRIMARY);
                self.put(".");
                self.put(method.name);
            }
            called => self.expression(called, level::PRIMARY),
        }
        self.arguments(&call.args);
    }

    fn arguments(&mut self, arguments: &[CallArg<'_>]) {
        self.put("(");
        for (number, argument) in arguments.iter().enumerate() {
            if number > 0 {
                self.put(", ");
            }
            let value = match argument {
                CallArg::Pos(value) => value,
                CallArg::Kwarg(name, value) => {
                    self.put(name);
                    self.put("=");
                    value
                }
                CallArg::PosSplat(value) => {
                    self.put("*");
                    value
                }
                CallArg::KwargSplat(value) => {
                    self.put("**");
                    value
                }
            };
            self.expression(value, level::ANY);
        }
        self.put(")");
    }

    /// An expression where one stands that binds at least so tightly.
    fn expression(&mut self, expression: &Expr<'_>, at_least: u8) {
        let is_loose = level_of(expression) < at_least;
        if is_loose {
            self.put("(");
        }
        match expression {
            Expr::Var(variable) => self.put(variable.id),
            Expr::Const(constant) => self.constant(constant),
            Expr::Slice(slice) => self.slice(slice),
            Expr::UnaryOp(operation) => match operation.op {
                UnaryOpKind::Not => {
                    self.put("not ");
                    self.expression(&operation.expr, level::NOT);
                }
                UnaryOpKind::Neg => {
                    self.put("-");
                    self.expression(&operation.expr, level::NEGATED);
                }
            },
            Expr::BinOp(operation) => match operation.op {
                BinOpKind::Concat => {
                    let mut parts = Vec::new();
                    concatenated(expression, &mut parts);
                    self.filtered(parts[0], operators::CONCATENATED, &parts[1..]);
                }
                BinOpKind::Rem => {
                    self.filtered(&operation.left, operators::REST, &[&operation.right]);
                }
                other => {
                    let (sign, level) = operator(other);
                    // A comparison beside one is a chain otherwise.
                    let left = match level {
                        level::COMPARISON => level + 1,
                        _ => level,
                    };
                    self.expression(&operation.left, left);
                    self.put(sign);
                    self.expression(&operation.right, level + 1);
                }
            },
            Expr::Compare(compare) => self.comparison(compare),
            Expr::IfExpr(choice) => {
                self.expression(&choice.true_expr, level::OR);
                self.put(" if ");
                self.expression(&choice.test_expr, level::OR);
                if let Some(otherwise) = &choice.false_expr {
                    self.put(" else ");
                    self.expression(otherwise, level::ANY);
                }
            }
            Expr::Filter(filter) => {
                if let Some(value) = &filter.expr {
                    self.expression(value, level::FILTERED);
                    self.put(" | ");
                }
                self.put(filter.name);
                self.arguments(&filter.args);
            }
            Expr::Test(test) => {
                self.expression(&test.expr, level::FILTERED);
                self.put(" is ");
                self.put(test.name);
                self.arguments(&test.args);
            }
            Expr::GetAttr(attribute) => {
                if operators::is_method_of_dict(attribute.name) {
                    self.expression(&attribute.expr, level::FILTERED);
                    let _ = write!(
                        self.out,
                        " | {}(\"{}\")",
                        operators::ATTRIBUTE,
                        attribute.name
                    );
                } else {
                    self.expression(&attribute.expr, level::PRIMARY);
                    self.put(".");
                    self.put(attribute.name);
                }
            }
            Expr::GetItem(item) => {
                self.expression(&item.expr, level::PRIMARY);
                self.put("[");
                self.expression(&item.subscript_expr, level::ANY);
                self.put("]");
            }
            Expr::Call(call) => self.call(call),
            Expr::List(list) => {
                self.put("[");
                self.items(&list.items);
                self.put("]");
            }
            Expr::Tuple(tuple) => {
                self.put("(");
                self.items(&tuple.items);
                self.put(")");
            }
            Expr::Map(map) => self.map(map),
        }
        if is_loose {
            self.put(")");
        }
    }

    /// Each with a comma behind it, by which one item is a tuple.
    fn items(&mut self, items: &[Expr<'_>]) {
        for item in items {
            self.expression(item, level::ANY);
            self.put(", ");
        }
    }

    fn map(&mut self, map: &Map<'_>) {
        self.put("{");
        for (key, value) in map.keys.iter().zip(&map.values) {
            self.expression(key, level::ANY);
            self.put(": ");
            self.expression(value, level::ANY);
            self.put(", ");
        }
        self.put("}");
    }

    fn comparison(&mut self, compare: &Compare<'_>) {
        self.expression(&compare.expr, level::SUM);
        for operation in &compare.ops {
            self.put(match operation.op {
                CompareOpKind::Eq => " == ",
                CompareOpKind::Ne => " != ",
                CompareOpKind::Lt => " < ",
                CompareOpKind::Lte => " <= ",
                CompareOpKind::Gt => " > ",
                CompareOpKind::Gte => " >= ",
                CompareOpKind::In => " in ",
                CompareOpKind::NotIn => " not in ",
            });
            self.expression(&operation.expr, level::SUM);
        }
    }

    fn slice(&mut self, slice: &Slice<'_>) {
        self.expression(&slice.expr, level::FILTERED);
        let _ = write!(self.out, " | {}(", operators::SLICED);
        for (number, bound) in [&slice.start, &slice.stop, &slice.step]
            .into_iter()
            .enumerate()
        {
            if number > 0 {
                self.put(", ");
            }
            match bound {
                Some(bound) => self.expression(bound, level::ANY),
                None => self.put("none"),
            }
        }
        self.put(")");
    }

    fn filtered(&mut self, value: &Expr<'_>, filter: &str, arguments: &[&Expr<'_>]) {
        self.expression(value, level::FILTERED);
        let _ = write!(self.out, " | {filter}(");
        for argument in arguments {
            self.expression(argument, level::ANY);
            self.put(", ");
        }
        self.put(")");
    }

    fn constant(&mut self, constant: &Const) {
        let value = &constant.value;
        match value.kind() {
            ValueKind::None => self.put("none"),
            ValueKind::Bool => self.put(if value.is_true() { "true" } else { "false" }),
            ValueKind::String => {
                self.put("\"");
                for char in value.as_str().unwrap_or_default().chars() {
                    match char {
                        '"' => self.put("\\\""),
                        '\\' => self.put("\\\\"),
                        char => self.put(char.encode_utf8(&mut [0; 4])),
                    }
                }
                self.put("\"");
            }
            _ if value.is_integer() => self.put(&value.to_string()),
            _ => match f64::try_from(value.clone()) {
                Ok(number) if number.is_finite() => self.put(&format!("{number:?}")),
                // The only number in a source that is not finite is too large for one.
                _ => self.put("1e999"),
            },
        }
    }
}

/// The parts of a concatenation, from the left.
fn concatenated<'e>(expression: &'e Expr<'e>, parts: &mut Vec<&'e Expr<'e>>) {
    match expression {
        Expr::BinOp(operation) if matches!(operation.op, BinOpKind::Concat) => {
            concatenated(&operation.left, parts);
            parts.push(&operation.right);
        }
        other => parts.push(other),
    }
}

fn is_constant(expression: &Expr<'_>) -> bool {
    match expression {
        Expr::List(list) => list.items.is_empty(),
        Expr::Map(map) => map.keys.is_empty(),
        other => matches!(other, Expr::Const(_)),
    }
}

fn operator(kind: BinOpKind) -> (&'static str, u8) {
    match kind {
        BinOpKind::Eq => (" == ", level::COMPARISON),
        BinOpKind::Ne => (" != ", level::COMPARISON),
        BinOpKind::Lt => (" < ", level::COMPARISON),
        BinOpKind::Lte => (" <= ", level::COMPARISON),
        BinOpKind::Gt => (" > ", level::COMPARISON),
        BinOpKind::Gte => (" >= ", level::COMPARISON),
        BinOpKind::In => (" in ", level::COMPARISON),
        BinOpKind::ScAnd => (" and ", level::AND),
        BinOpKind::ScOr => (" or ", level::OR),
        BinOpKind::Add => (" + ", level::SUM),
        BinOpKind::Sub => (" - ", level::SUM),
        BinOpKind::Mul => (" * ", level::PRODUCT),
        BinOpKind::Div => (" / ", level::PRODUCT),
        BinOpKind::FloorDiv => (" // ", level::PRODUCT),
        BinOpKind::Pow => (" ** ", level::POWER),
        // Written as filters.
        BinOpKind::Rem | BinOpKind::Concat => ("", level::FILTERED),
    }
}

fn level_of(expression: &Expr<'_>) -> u8 {
    match expression {
        Expr::IfExpr(_) => level::ANY,
        Expr::BinOp(operation) => operator(operation.op).1,
        Expr::Compare(_) => level::COMPARISON,
        Expr::UnaryOp(operation) => match operation.op {
            UnaryOpKind::Not => level::NOT,
            UnaryOpKind::Neg => level::NEGATED,
        },
        Expr::Filter(_) | Expr::Test(_) | Expr::Slice(_) => level::FILTERED,
        Expr::GetAttr(attribute) if operators::is_method_of_dict(attribute.name) => level::FILTERED,
        Expr::Var(_)
        | Expr::Const(_)
        | Expr::GetAttr(_)
        | Expr::GetItem(_)
        | Expr::Call(_)
        | Expr::List(_)
        | Expr::Tuple(_)
        | Expr::Map(_) => level::PRIMARY,
    }
}
