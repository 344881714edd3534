//! Writes a template's source anew, with what Python does otherwise than the template engine as calls of the filters in
//! `operators`: `%`, `~`, slices, loops over texts, methods that are not called. Blocks are already trimmed in it. Pure.

mod expression;
mod level;

use std::fmt::Write;

use minijinja::machinery::ast::{Expr, ForLoop, IfCond, Macro, Stmt};

use self::expression::{Writer, concatenated, is_constant};
use super::operators;

/// The source of a tree, whose statements stand on the lines that they had.
pub(super) fn of(tree: &Stmt<'_>) -> String {
    let mut writer = Writer::new();
    writer.statement(tree);
    writer.out
}

impl Writer {
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
}
