//! Whether a template iterates over the content of a message as a list of parts, or prints it as one text. Decided
//! from its syntax tree by the rules of vLLM 0.32, so that both pass the template the same.
//!
//! The rules follow names, not scopes: a loop over `messages` (or a variable set to it) names a message, a loop over
//! the `content` of that message means parts. A macro's parameter counts if the content of a message is passed to
//! it. Loops or sets that unpack several names make the engine give up, and so does this: text.

use minijinja::machinery::ast::{CallArg, Expr, ForLoop, Macro, Stmt};
use minijinja::syntax::SyntaxConfig;
use serde::{Deserialize, Serialize};

/// How a message's content is handed to a template.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ContentFormat {
    /// One text: the parts' texts, a line each.
    String,
    /// The parts themselves, as the OpenAI API writes them.
    Openai,
}

impl ContentFormat {
    pub(super) fn of(source: &str, syntax: &SyntaxConfig) -> Self {
        let Ok(tree) = minijinja::machinery::parse(source, "", syntax.clone()) else {
            return ContentFormat::String;
        };
        let mut found = Found::default();
        found.inside(&tree, None);
        match found.walks_parts() {
            Ok(true) => ContentFormat::Openai,
            Ok(false) | Err(GivesUp) => ContentFormat::String,
        }
    }
}

/// A name is needed and several are there.
struct GivesUp;

/// What the rules look at, in the order of the source.
#[derive(Default)]
struct Found<'t> {
    sets: Vec<(&'t Expr<'t>, &'t Expr<'t>)>,
    loops: Vec<Loop<'t>>,
    macros: Vec<&'t Macro<'t>>,
    calls: Vec<(&'t str, &'t [CallArg<'t>])>,
}

struct Loop<'t> {
    target: &'t Expr<'t>,
    over: &'t Expr<'t>,
    /// The innermost macro around it (by place in `macros`).
    within: Option<usize>,
}

impl<'t> Found<'t> {
    fn walks_parts(&self) -> Result<bool, GivesUp> {
        let messages = self.names_of_messages()?;
        let mut message = Vec::new();
        for each in &self.loops {
            if messages.iter().any(|name| is_access(each.over, name, None)) {
                message.push(name(each.target).ok_or(GivesUp)?);
            }
        }
        let is_content = |expr: &Expr<'_>| {
            message
                .iter()
                .any(|name| is_access(expr, name, Some("content")))
        };
        for each in &self.loops {
            let handed = match (each.within, name(each.over)) {
                (None, Some(over)) => over == "content",
                (Some(within), Some(over)) => self.is_handed(within, over, &is_content),
                (_, None) => false,
            };
            if is_content(each.over) || handed {
                return name(each.target).map(|_| true).ok_or(GivesUp);
            }
        }
        Ok(false)
    }

    /// `messages` and every name that was set to it or to a part of it.
    fn names_of_messages(&self) -> Result<Vec<&'t str>, GivesUp> {
        let mut names = vec!["messages"];
        let mut at = 0;
        while at < names.len() {
            for (target, value) in &self.sets {
                if is_access(value, names[at], None) {
                    let target = name(target).ok_or(GivesUp)?;
                    if !names.contains(&target) {
                        names.push(target);
                    }
                }
            }
            at += 1;
        }
        Ok(names)
    }

    /// Whether some call of a macro hands a message's content to this parameter.
    fn is_handed(
        &self,
        within: usize,
        parameter: &str,
        is_content: &dyn Fn(&Expr<'_>) -> bool,
    ) -> bool {
        let made = self.macros[within];
        let place = made
            .args
            .iter()
            .position(|arg| name(arg) == Some(parameter));
        let Some(place) = place else { return false };
        self.calls
            .iter()
            .filter(|(called, _)| *called == made.name)
            .any(|(_, args)| {
                let mut positional = 0;
                args.iter().any(|arg| match arg {
                    CallArg::Pos(value) => {
                        positional += 1;
                        positional - 1 == place && is_content(value)
                    }
                    CallArg::Kwarg(key, value) => *key == parameter && is_content(value),
                    CallArg::PosSplat(_) | CallArg::KwargSplat(_) => false,
                })
            })
    }

    fn statements(&mut self, body: &'t [Stmt<'t>], within: Option<usize>) {
        for statement in body {
            self.inside(statement, within);
        }
    }

    fn inside(&mut self, statement: &'t Stmt<'t>, within: Option<usize>) {
        match statement {
            Stmt::Template(it) => self.statements(&it.children, within),
            Stmt::EmitExpr(it) => self.expr(&it.expr),
            Stmt::ForLoop(it) => self.for_loop(it, within),
            Stmt::IfCond(it) => {
                self.expr(&it.expr);
                self.statements(&it.true_body, within);
                self.statements(&it.false_body, within);
            }
            Stmt::WithBlock(it) => {
                for (_, value) in &it.assignments {
                    self.expr(value);
                }
                self.statements(&it.body, within);
            }
            Stmt::Set(it) => {
                self.sets.push((&it.target, &it.expr));
                self.expr(&it.expr);
            }
            Stmt::SetBlock(it) => self.statements(&it.body, within),
            Stmt::AutoEscape(it) => self.statements(&it.body, within),
            Stmt::FilterBlock(it) => self.statements(&it.body, within),
            Stmt::Block(it) => self.statements(&it.body, within),
            Stmt::Macro(it) => {
                self.macros.push(it);
                let within = self.macros.len() - 1;
                self.statements(&it.body, Some(within));
            }
            Stmt::CallBlock(it) => {
                self.call(&it.call.expr, &it.call.args);
                self.statements(&it.macro_decl.body, within);
            }
            Stmt::Do(it) => self.call(&it.call.expr, &it.call.args),
            // No chat template brings other files along, and the rest has nothing inside.
            Stmt::Import(_)
            | Stmt::FromImport(_)
            | Stmt::Extends(_)
            | Stmt::Include(_)
            | Stmt::EmitRaw(_)
            | Stmt::Continue(_)
            | Stmt::Break(_) => {}
        }
    }

    fn for_loop(&mut self, it: &'t ForLoop<'t>, within: Option<usize>) {
        self.loops.push(Loop {
            target: &it.target,
            over: &it.iter,
            within,
        });
        self.expr(&it.iter);
        if let Some(filter) = &it.filter_expr {
            self.expr(filter);
        }
        self.statements(&it.body, within);
        self.statements(&it.else_body, within);
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

    /// Only calls are looked for inside expressions.
    fn expr(&mut self, expr: &'t Expr<'t>) {
        match expr {
            Expr::Var(_) | Expr::Const(_) => {}
            Expr::Slice(it) => {
                self.expr(&it.expr);
                for part in [&it.start, &it.stop, &it.step].into_iter().flatten() {
                    self.expr(part);
                }
            }
            Expr::UnaryOp(it) => self.expr(&it.expr),
            Expr::BinOp(it) => {
                self.expr(&it.left);
                self.expr(&it.right);
            }
            Expr::Compare(it) => {
                self.expr(&it.expr);
                for op in &it.ops {
                    self.expr(&op.expr);
                }
            }
            Expr::IfExpr(it) => {
                self.expr(&it.test_expr);
                self.expr(&it.true_expr);
                if let Some(other) = &it.false_expr {
                    self.expr(other);
                }
            }
            Expr::Filter(it) => {
                if let Some(value) = &it.expr {
                    self.expr(value);
                }
                self.args(&it.args);
            }
            Expr::Test(it) => {
                self.expr(&it.expr);
                self.args(&it.args);
            }
            Expr::GetAttr(it) => self.expr(&it.expr),
            Expr::GetItem(it) => {
                self.expr(&it.expr);
                self.expr(&it.subscript_expr);
            }
            Expr::Call(it) => self.call(&it.expr, &it.args),
            Expr::List(it) => it.items.iter().for_each(|item| self.expr(item)),
            Expr::Tuple(it) => it.items.iter().for_each(|item| self.expr(item)),
            Expr::Map(it) => {
                it.keys.iter().for_each(|key| self.expr(key));
                it.values.iter().for_each(|value| self.expr(value));
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

/// `name` (or `name.key`, `name['key']`), whole, sliced, filtered or tested.
fn is_access(expr: &Expr<'_>, wanted: &str, key: Option<&str>) -> bool {
    match (expr, key) {
        (Expr::Filter(it), _) => it
            .expr
            .as_ref()
            .is_some_and(|expr| is_access(expr, wanted, key)),
        (Expr::Test(it), _) => is_access(&it.expr, wanted, key),
        (Expr::Slice(it), _) => is_access(&it.expr, wanted, key),
        (Expr::Var(var), None) => var.id == wanted,
        (Expr::GetAttr(it), Some(key)) => name(&it.expr) == Some(wanted) && it.name == key,
        (Expr::GetItem(it), Some(key)) => {
            let constant = match &it.subscript_expr {
                Expr::Const(constant) => constant.value.as_str(),
                _ => None,
            };
            name(&it.expr) == Some(wanted) && constant == Some(key)
        }
        _ => false,
    }
}
