//! PTX in `asm`: a text becomes statements, and each statement C++ for the processor.
//!
//! The grammar is PTX's (ISA 9.0, chapter 4) as far as inline assembly has it: blocks, `.reg`, guards, opcodes with modifiers, and operands.
//! What a statement does follows from its opcode and its modifiers, in [`meaning`] and [`copies`].

mod copies;
mod meaning;

/// What an instruction works on.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Operand {
    /// `%0`: an operand of the `asm`.
    Argument(usize),
    /// `%%name`: a special register.
    Special(String),
    /// A register of the text, or `_`.
    Register(String),
    Number(String),
    Vector(Vec<Operand>),
    /// `[base+offset]`.
    Address(Box<Operand>, i64),
}

/// `@!p opcode.modifiers operands;`
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Instruction {
    /// The predicate, and whether its negation is meant.
    guard: Option<(Operand, bool)>,
    opcode: String,
    modifiers: Vec<String>,
    operands: Vec<Operand>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
enum Statement {
    /// The type without its dot, and the names.
    Registers(String, Vec<String>),
    Instruction(Instruction),
}

/// The C++ of a text, in which `$0` is the first operand of the `asm`.
pub(crate) fn translate(text: &str) -> Result<String, String> {
    let mut code = String::new();
    for statement in (Parser { rest: text }).statements()? {
        let line = match &statement {
            Statement::Registers(kind, names) => meaning::registers(kind, names)?,
            Statement::Instruction(instruction) => meaning::instruction(instruction)?,
        };
        code.push_str(&line);
        code.push(' ');
    }
    Ok(code.trim_end().to_owned())
}

struct Parser<'t> {
    rest: &'t str,
}

impl Parser<'_> {
    /// Whether the text goes on with this, which is then behind.
    fn accept(&mut self, token: &str) -> bool {
        self.rest = self.rest.trim_start();
        let rest = self.rest.strip_prefix(token);
        self.rest = rest.unwrap_or(self.rest);
        rest.is_some()
    }

    fn expect(&mut self, token: &str) -> Result<(), String> {
        if self.accept(token) { Ok(()) } else { Err(format!("`{token}` is missing before `{}`", self.rest)) }
    }

    fn word(&mut self, allowed: impl Fn(char) -> bool) -> Result<String, String> {
        self.rest = self.rest.trim_start();
        let len = self.rest.find(|c| !allowed(c)).unwrap_or(self.rest.len());
        let (word, rest) = self.rest.split_at(len);
        self.rest = rest;
        if word.is_empty() { Err(format!("a name is missing before `{rest}`")) } else { Ok(word.to_owned()) }
    }

    fn name(&mut self) -> Result<String, String> {
        self.word(|c| c.is_ascii_alphanumeric() || c == '_' || c == '$')
    }

    /// Statements up to the end of the text; names of inner blocks are not hidden from each other, as PTX would.
    fn statements(mut self) -> Result<Vec<Statement>, String> {
        let (mut statements, mut depth) = (Vec::new(), 0usize);
        loop {
            if self.accept("{") {
                depth += 1;
            } else if self.accept("}") {
                depth = depth.checked_sub(1).ok_or("a `}` without a `{`")?;
            } else if self.rest.trim().is_empty() {
                return if depth == 0 { Ok(statements) } else { Err("a `{` without a `}`".to_owned()) };
            } else if self.accept(".reg") {
                self.expect(".")?;
                let (kind, names) = (self.name()?, self.list(Self::name)?);
                statements.push(Statement::Registers(kind, names));
                self.expect(";")?;
            } else {
                statements.push(Statement::Instruction(self.instruction()?));
            }
        }
    }

    fn list<T>(&mut self, item: impl Fn(&mut Self) -> Result<T, String>) -> Result<Vec<T>, String> {
        let mut items = vec![item(self)?];
        while self.accept(",") {
            items.push(item(self)?);
        }
        Ok(items)
    }

    fn instruction(&mut self) -> Result<Instruction, String> {
        let guard = if self.accept("@") {
            let is_negated = self.accept("!");
            Some((self.operand()?, is_negated))
        } else {
            None
        };
        let whole = self.word(|c| c.is_ascii_alphanumeric() || "_.:".contains(c))?;
        let mut parts = whole.split('.').map(str::to_owned);
        let opcode = parts.next().unwrap_or_default();
        let modifiers = parts.collect();
        let operands = if self.accept(";") {
            Vec::new()
        } else {
            let operands = self.list(Self::operand)?;
            self.expect(";")?;
            operands
        };
        Ok(Instruction { guard, opcode, modifiers, operands })
    }

    fn operand(&mut self) -> Result<Operand, String> {
        if self.accept("{") {
            let all = self.list(Self::operand)?;
            self.expect("}")?;
            return Ok(Operand::Vector(all));
        }
        if self.accept("[") {
            let base = self.operand()?;
            let offset = if self.accept("+") {
                let text = self.name()?;
                text.parse().map_err(|_| format!("`{text}` is no offset"))?
            } else {
                0
            };
            self.expect("]")?;
            return Ok(Operand::Address(Box::new(base), offset));
        }
        if self.accept("%%") {
            return self.word(|c| c.is_ascii_alphanumeric() || "_.".contains(c)).map(Operand::Special);
        }
        if self.accept("%") {
            let number = self.name()?;
            return number.parse().map(Operand::Argument).map_err(|_| format!("`%{number}` is no operand"));
        }
        let sign = if self.accept("-") { "-" } else { "" };
        let name = self.name()?;
        match name.starts_with(|c: char| c.is_ascii_digit()) {
            true => Ok(Operand::Number(format!("{sign}{name}"))),
            false if sign.is_empty() => Ok(Operand::Register(name)),
            false => Err(format!("`-{name}` is no operand")),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::translate;

    #[test]
    fn meaning_follows_from_modifiers() {
        let acquire = translate("ld.acquire.gpu.global.u32 %0, [%1];").unwrap();
        assert_eq!(
            acquire,
            "$0 = emulator::load<uint32_t>((void*)($1), emulator::STRONG | emulator::ACQUIRE | emulator::GPU);"
        );
        let vector = translate("st.volatile.global.v4.u32 [%0], {%1,%2,%3,%4};").unwrap();
        assert!(
            vector.contains(
                "emulator::vector<uint32_t, 4>{{(uint32_t)$1, (uint32_t)$2, (uint32_t)$3, (uint32_t)$4}}"
            ),
            "{vector}"
        );
        assert!(vector.contains("emulator::STRONG | emulator::SYSTEM"), "{vector}");
    }

    #[test]
    fn blocks_registers_and_guards_are_understood() {
        let code = translate(
            "{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }",
        );
        assert_eq!(
            code.unwrap(),
            "bool ptx_p; ptx_p = emulator::barrier_try_wait($1, $2); $0 = ptx_p ? 1 : 0;"
        );
        let guarded = translate("{ .reg .pred q; @!q st.global.u32 [%0+4], %1; }").unwrap();
        assert!(guarded.contains("if (!(ptx_q))") && guarded.contains("+ 4"), "{guarded}");
    }

    #[test]
    fn what_is_unknown_is_refused_by_name() {
        for (text, name) in [
            ("prefetch.global.L2 [%0];", "prefetch"),
            ("ld.mmio.sys.global.u32 %0, [%1];", "mmio"),
            ("fence.proxy.alias;", "alias"),
            ("mov.u32 %0, %%smid;", "smid"),
            ("{ ld.global.u32 %0, [%1];", "{"),
        ] {
            let error = translate(text).unwrap_err();
            assert!(error.contains(name), "{error}");
        }
    }
}
