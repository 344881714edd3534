//! Whether a template iterates over the content of a message as a list of parts, or prints it as one text. Decided
//! from its syntax tree by the rules of vLLM 0.33, so that both pass the template the same. (0.32 differs only in templates
//! that keep the messages in a namespace.)
//!
//! The rules follow names, not scopes. The target of a loop over `messages`, or over a variable or an attribute of a
//! namespace set to it, is a message. A loop over `content` of a message means parts; so does a loop over the parameter of a macro that is called
//! with such a content. If a relevant loop unpacks several names, the result is text, as in vLLM.

use minijinja::machinery::ast::{CallArg, Expr, ForLoop, Macro, Stmt};
use serde::{Deserialize, Serialize};

/// The form in which a template gets the content of a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ContentFormat {
    /// One text: the texts of the parts, joined by line ends.
    String,
    /// A list of parts, as in the OpenAI API.
    Openai,
}

impl ContentFormat {
    pub(super) fn of(tree: &Stmt<'_>) -> Self {
        let mut syntax = TemplateSyntax::default();
        syntax.visit(tree, None);
        match syntax.iterates_parts() {
            Ok(true) => ContentFormat::Openai,
            Ok(false) | Err(SeveralNames) => ContentFormat::String,
        }
    }
}

/// A loop unpacks several names where the rules need one.
struct SeveralNames;

/// The statements that the rules need, in source order.
#[derive(Default)]
struct TemplateSyntax<'t> {
    /// Assignments: target and value.
    sets: Vec<(&'t Expr<'t>, &'t Expr<'t>)>,
    loops: Vec<Loop<'t>>,
    macros: Vec<&'t Macro<'t>>,
    /// Calls of macros: name and arguments.
    calls: Vec<(&'t str, &'t [CallArg<'t>])>,
}

struct Loop<'t> {
    target: &'t Expr<'t>,
    iterable: &'t Expr<'t>,
    /// The innermost enclosing macro, as an index of `macros`.
    in_macro: Option<usize>,
}

impl<'t> TemplateSyntax<'t> {
    fn iterates_parts(&self) -> Result<bool, SeveralNames> {
        let lists = self.message_lists();
        let mut message_names = Vec::new();
        for each in &self.loops {
            if lists
                .iter()
                .any(|name| is_access(each.iterable, name, None))
            {
                message_names.push(name(each.target).ok_or(SeveralNames)?);
            }
        }
        let is_content = |expr: &Expr<'_>| {
            message_names
                .iter()
                .any(|name| is_access(expr, name, Some("content")))
        };
        for each in &self.loops {
            let is_argument = match (each.in_macro, name(each.iterable)) {
                (None, Some(iterable)) => iterable == "content",
                (Some(in_macro), Some(parameter)) => {
                    self.is_content_parameter(in_macro, parameter, &is_content)
                }
                (_, None) => false,
            };
            if is_content(each.iterable) || is_argument {
                return name(each.target).map(|_| true).ok_or(SeveralNames);
            }
        }
        Ok(false)
    }

    /// `messages` and every name that is set to it or to a slice of it; of a namespace's attribute `space.name`.
    fn message_lists(&self) -> Vec<String> {
        let mut names = vec!["messages".to_owned()];
        let mut next = 0;
        while let Some(known) = names.get(next).cloned() {
            for (target, value) in &self.sets {
                let aliases = if is_access(value, &known, None) {
                    dotted_name(target).into_iter().collect()
                } else {
                    namespace_aliases(target, value, &known)
                };
                for alias in aliases {
                    if !names.contains(&alias) {
                        names.push(alias);
                    }
                }
            }
            next += 1;
        }
        names
    }

    /// Whether any call of a macro passes the content of a message as this parameter.
    fn is_content_parameter(
        &self,
        in_macro: usize,
        parameter: &str,
        is_content: &dyn Fn(&Expr<'_>) -> bool,
    ) -> bool {
        let definition = self.macros[in_macro];
        let position = definition
            .args
            .iter()
            .position(|arg| name(arg) == Some(parameter));
        let Some(position) = position else {
            return false;
        };
        self.calls
            .iter()
            .filter(|(called, _)| *called == definition.name)
            .any(|(_, args)| {
                let mut positional = 0;
                args.iter().any(|arg| match arg {
                    CallArg::Pos(value) => {
                        positional += 1;
                        positional - 1 == position && is_content(value)
                    }
                    CallArg::Kwarg(key, value) => *key == parameter && is_content(value),
                    CallArg::PosSplat(_) | CallArg::KwargSplat(_) => false,
                })
            })
    }

    fn visit_all(&mut self, body: &'t [Stmt<'t>], in_macro: Option<usize>) {
        for statement in body {
            self.visit(statement, in_macro);
        }
    }

    fn visit(&mut self, statement: &'t Stmt<'t>, in_macro: Option<usize>) {
        match statement {
            Stmt::Template(template) => self.visit_all(&template.children, in_macro),
            Stmt::EmitExpr(emitted) => self.expr(&emitted.expr),
            Stmt::ForLoop(for_loop) => self.for_loop(for_loop, in_macro),
            Stmt::IfCond(condition) => {
                self.expr(&condition.expr);
                self.visit_all(&condition.true_body, in_macro);
                self.visit_all(&condition.false_body, in_macro);
            }
            Stmt::WithBlock(with) => {
                for (_, value) in &with.assignments {
                    self.expr(value);
                }
                self.visit_all(&with.body, in_macro);
            }
            Stmt::Set(set) => {
                self.sets.push((&set.target, &set.expr));
                self.expr(&set.expr);
            }
            Stmt::SetBlock(block) => self.visit_all(&block.body, in_macro),
            Stmt::AutoEscape(block) => self.visit_all(&block.body, in_macro),
            Stmt::FilterBlock(block) => self.visit_all(&block.body, in_macro),
            Stmt::Block(block) => self.visit_all(&block.body, in_macro),
            Stmt::Macro(definition) => {
                self.macros.push(definition);
                let in_macro = self.macros.len() - 1;
                self.visit_all(&definition.body, Some(in_macro));
            }
            Stmt::CallBlock(block) => {
                self.call(&block.call.expr, &block.call.args);
                self.visit_all(&block.macro_decl.body, in_macro);
            }
            Stmt::Do(statement) => self.call(&statement.call.expr, &statement.call.args),
            // Chat templates do not import other files; the other statements contain nothing.
            Stmt::Import(_)
            | Stmt::FromImport(_)
            | Stmt::Extends(_)
            | Stmt::Include(_)
            | Stmt::EmitRaw(_)
            | Stmt::Continue(_)
            | Stmt::Break(_) => {}
        }
    }

    fn for_loop(&mut self, for_loop: &'t ForLoop<'t>, in_macro: Option<usize>) {
        self.loops.push(Loop {
            target: &for_loop.target,
            iterable: &for_loop.iter,
            in_macro,
        });
        self.expr(&for_loop.iter);
        if let Some(filter) = &for_loop.filter_expr {
            self.expr(filter);
        }
        self.visit_all(&for_loop.body, in_macro);
        self.visit_all(&for_loop.else_body, in_macro);
    }

    fn call(&mut self, called: &'t Expr<'t>, args: &'t [CallArg<'t>]) {
        if let Some(name) = name(called) {
            self.calls.push((name, args));
        }
        self.expr(called);
        self.args(args);
    }

    fn args(&mut self, args: &'t [CallArg<'t>]) {
        for arg in args {
            match arg {
                CallArg::Pos(value)
                | CallArg::Kwarg(_, value)
                | CallArg::PosSplat(value)
                | CallArg::KwargSplat(value) => self.expr(value),
            }
        }
    }

    /// Collects the calls inside an expression.
    fn expr(&mut self, expr: &'t Expr<'t>) {
        match expr {
            Expr::Var(_) | Expr::Const(_) => {}
            Expr::Slice(slice) => {
                self.expr(&slice.expr);
                for part in [&slice.start, &slice.stop, &slice.step]
                    .into_iter()
                    .flatten()
                {
                    self.expr(part);
                }
            }
            Expr::UnaryOp(operation) => self.expr(&operation.expr),
            Expr::BinOp(operation) => {
                self.expr(&operation.left);
                self.expr(&operation.right);
            }
            Expr::Compare(comparison) => {
                self.expr(&comparison.expr);
                for op in &comparison.ops {
                    self.expr(&op.expr);
                }
            }
            Expr::IfExpr(choice) => {
                self.expr(&choice.test_expr);
                self.expr(&choice.true_expr);
                if let Some(other) = &choice.false_expr {
                    self.expr(other);
                }
            }
            Expr::Filter(filter) => {
                if let Some(value) = &filter.expr {
                    self.expr(value);
                }
                self.args(&filter.args);
            }
            Expr::Test(test) => {
                self.expr(&test.expr);
                self.args(&test.args);
            }
            Expr::GetAttr(access) => self.expr(&access.expr),
            Expr::GetItem(access) => {
                self.expr(&access.expr);
                self.expr(&access.subscript_expr);
            }
            Expr::Call(call) => self.call(&call.expr, &call.args),
            Expr::List(list) => list.items.iter().for_each(|item| self.expr(item)),
            Expr::Tuple(tuple) => tuple.items.iter().for_each(|item| self.expr(item)),
            Expr::Map(map) => {
                map.keys.iter().for_each(|key| self.expr(key));
                map.values.iter().for_each(|value| self.expr(value));
            }
        }
    }
}

fn name<'t>(expr: &Expr<'t>) -> Option<&'t str> {
    match expr {
        Expr::Var(var) => Some(var.id),
        _ => None,
    }
}

/// `name`, or `space.name`.
fn dotted_name(expr: &Expr<'_>) -> Option<String> {
    match expr {
        Expr::Var(var) => Some(var.id.to_owned()),
        Expr::GetAttr(access) => Some(format!("{}.{}", dotted_name(&access.expr)?, access.name)),
        _ => None,
    }
}

/// The attributes of a new namespace that are set to `wanted`.
fn namespace_aliases(target: &Expr<'_>, value: &Expr<'_>, wanted: &str) -> Vec<String> {
    let (Some(space), Expr::Call(call)) = (name(target), value) else {
        return Vec::new();
    };
    if name(&call.expr) != Some("namespace") {
        return Vec::new();
    }
    let alias = |arg: &CallArg<'_>| match arg {
        CallArg::Kwarg(key, value) if is_access(value, wanted, None) => {
            Some(format!("{space}.{key}"))
        }
        _ => None,
    };
    call.args.iter().filter_map(alias).collect()
}

/// Whether an expression is `wanted` (with `key`: `wanted.key` or `wanted['key']`), also sliced, filtered or tested.
fn is_access(expr: &Expr<'_>, wanted: &str, key: Option<&str>) -> bool {
    match (expr, key) {
        (Expr::Filter(filter), _) => filter
            .expr
            .as_ref()
            .is_some_and(|expr| is_access(expr, wanted, key)),
        (Expr::Test(test), _) => is_access(&test.expr, wanted, key),
        (Expr::Slice(slice), _) => is_access(&slice.expr, wanted, key),
        (Expr::Var(var), None) => var.id == wanted,
        (Expr::GetAttr(_), None) => {
            wanted.contains('.') && dotted_name(expr).as_deref() == Some(wanted)
        }
        (Expr::GetAttr(access), Some(key)) => {
            name(&access.expr) == Some(wanted) && access.name == key
        }
        (Expr::GetItem(access), Some(key)) => {
            let constant = match &access.subscript_expr {
                Expr::Const(constant) => constant.value.as_str(),
                _ => None,
            };
            name(&access.expr) == Some(wanted) && constant == Some(key)
        }
        _ => false,
    }
}
