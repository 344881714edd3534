//! What a template's source is written with: texts on the lines that they had, and expressions. Pure.

use std::fmt::Write;

use minijinja::machinery::ast::{
    BinOpKind, Call, CallArg, Compare, CompareOpKind, Const, Expr, Map, Slice, UnaryOpKind,
};
use minijinja::value::ValueKind;

use super::level;
use crate::prompt::template::operators;

/// A source that is being written.
pub(super) struct Writer {
    pub(super) out: String,
    line: u16,
}

impl Writer {
    pub(super) fn new() -> Self {
        Self {
            out: String::new(),
            line: 1,
        }
    }

    pub(super) fn put(&mut self, text: &str) {
        let lines = text.bytes().filter(|byte| *byte == b'\n').count();
        let lines = u16::try_from(lines).unwrap_or(u16::MAX);
        self.line = self.line.saturating_add(lines);
        self.out.push_str(text);
    }

    /// Begins a tag on its line, so that errors name it.
    pub(super) fn open(&mut self, tag: &str, line: u16) {
        self.put(tag);
        while self.line < line {
            self.put("\n");
        }
    }

    pub(super) fn call(&mut self, call: &Call<'_>) {
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

    pub(super) fn arguments(&mut self, arguments: &[CallArg<'_>]) {
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
    pub(super) fn expression(&mut self, expression: &Expr<'_>, at_least: u8) {
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
pub(super) fn concatenated<'e>(expression: &'e Expr<'e>, parts: &mut Vec<&'e Expr<'e>>) {
    match expression {
        Expr::BinOp(operation) if matches!(operation.op, BinOpKind::Concat) => {
            concatenated(&operation.left, parts);
            parts.push(&operation.right);
        }
        other => parts.push(other),
    }
}

pub(super) fn is_constant(expression: &Expr<'_>) -> bool {
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
