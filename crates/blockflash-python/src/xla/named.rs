//! The operands and attributes of a call by their names.

use super::parts::{Lead, Part};
use crate::error::{Failure, Result};
use blockflash_foreign::xla::{Attribute, Operand, Output};
use blockflash_foreign::{Argument, Arguments, Foreign};

/// The attribute that names the operands, with commas between.
const OPERANDS: &str = "operands";

/// What a call was given.
pub(super) struct Named<'c, 'a> {
    names: Vec<&'a str>,
    operands: &'c [Operand<'a>],
    attributes: &'c [(&'a str, Attribute<'a>)],
    lead: Lead<'a>,
    /// The size of the batch, of a call that is not packed.
    batch: Option<i64>,
}

impl<'c, 'a> Named<'c, 'a> {
    /// `known` are names that the target knows besides the options of the table; `o` is the shape
    /// of the output.
    pub(super) fn new(
        operands: &'c [Operand<'a>],
        attributes: &'c [(&'a str, Attribute<'a>)],
        o: &'a [i64],
        (table, known): (&[Argument], &[&str]),
    ) -> Result<Self> {
        let is_known = |name: &str| {
            known.contains(&name) || table.iter().any(|argument| argument.name == name)
        };
        let mut names = Vec::new();
        for &(name, value) in attributes {
            if name == OPERANDS {
                let Attribute::Text(list) = value else { return Err(wrong(name, "a string")) };
                names = list.split(',').collect();
            } else if !is_known(name) {
                return Err(Failure::value(format!("{name} is no attribute of this call")));
            }
        }
        let count = operands.len();
        if names.len() != count {
            let text = format!("{} operands are named, but there are {count}", names.len());
            return Err(Failure::value(text));
        }
        for (at, &name) in names.iter().enumerate() {
            if !is_known(name) || names[..at].contains(&name) {
                return Err(Failure::value(format!("{name} is no operand of this call, or twice")));
            }
        }
        let is_packed = names.contains(&"cu_seqlens_q");
        let rank = if is_packed { 3 } else { 4 };
        let Some(lead) = o.len().checked_sub(rank) else {
            let text = format!("o has shape {o:?}, expected at least {rank} dimensions");
            return Err(Failure::value(text));
        };
        let batch = (!is_packed).then(|| o[lead]);
        Ok(Self { names, operands, attributes, lead: Lead(&o[..lead]), batch })
    }

    pub(super) fn has(&self, name: &str) -> bool {
        self.names.contains(&name)
    }

    /// The operand of this name.
    pub(super) fn operand(&self, name: &str) -> Option<&'c Operand<'a>> {
        self.names.iter().position(|&found| found == name).map(|at| &self.operands[at])
    }

    /// The parts in which a call is computed: one, if the batch can take the dimensions of vmap.
    pub(super) fn parts(&self, outputs: &[(&str, &[i64])]) -> Result<Vec<Part>> {
        let operands = self.names.iter().zip(self.operands);
        let operands = operands.map(|(&name, operand)| (name, operand.dims()));
        let mut is_one = self.batch.is_some() || self.lead.count() == 1;
        for (name, dims) in operands.chain(outputs.iter().copied()) {
            is_one &= self.lead.region(name, dims, Part::All, self.batch)?.is_some();
        }
        Ok(if is_one && self.lead.count() > 0 { vec![Part::All] } else { self.entries() })
    }

    /// One part for each entry of vmap.
    pub(super) fn entries(&self) -> Vec<Part> {
        (0..self.lead.count()).map(Part::Entry).collect()
    }

    /// A part of the operand of this name.
    pub(super) fn tensor(&self, name: &'static str, part: Part) -> Result<Option<Foreign<'c>>> {
        let Some(operand) = self.operand(name) else { return Ok(None) };
        let region = self.lead.region(name, operand.dims(), part, self.batch)?;
        let region = region.ok_or_else(|| Failure::value(format!("{name} has no such part")))?;
        Ok(Some(operand.part(name, region.offset, &region.shape, &region.strides)?))
    }

    /// The same for operands that a call must have.
    pub(super) fn tensors<const N: usize>(
        &self,
        names: [&'static str; N],
        part: Part,
    ) -> Result<[Foreign<'c>; N]> {
        let mut found = Vec::with_capacity(N);
        for name in names {
            let tensor = self.tensor(name, part)?;
            found.push(tensor.ok_or_else(|| Failure::value(format!("{name} is needed")))?);
        }
        found.try_into().map_err(|_| Failure::value("operands are missing"))
    }

    /// A part of a result.
    pub(super) fn written<'o>(
        &self,
        name: &'static str,
        output: &'o mut Output<'_>,
        part: Part,
    ) -> Result<Foreign<'o>> {
        let region = self.lead.region(name, output.dims(), part, self.batch)?;
        let region = region.ok_or_else(|| Failure::value(format!("{name} has no such part")))?;
        Ok(output.part(name, region.offset, &region.shape, &region.strides)?)
    }

    fn attribute(&self, name: &str) -> Option<Attribute<'a>> {
        self.attributes.iter().find(|&&(found, _)| found == name).map(|&(_, value)| value)
    }

    /// An attribute that is a positive number, which a call must have.
    pub(super) fn size(&self, name: &str) -> Result<usize> {
        match self.attribute(name) {
            Some(Attribute::Int(value @ 1..)) => Ok(value as usize),
            found => Err(Failure::value(format!("{name} is {found:?}, expected at least 1"))),
        }
    }

    /// A truth value, which is false by default.
    pub(super) fn flag(&self, name: &'static str) -> Result<bool> {
        Ok(self.options(Part::All).bool(name)?.unwrap_or(false))
    }

    /// The options of a part.
    pub(super) fn options(&self, part: Part) -> Options<'_, 'c, 'a> {
        Options { named: self, part }
    }
}

/// The options of a part of a call, as its table asks for them.
pub(super) struct Options<'n, 'c, 'a> {
    named: &'n Named<'c, 'a>,
    part: Part,
}

impl<'c> Arguments for Options<'_, 'c, '_> {
    type Tensor = Foreign<'c>;
    type Error = Failure;

    fn tensor(&mut self, name: &'static str) -> Result<Option<Foreign<'c>>> {
        self.named.tensor(name, self.part)
    }

    fn int(&mut self, name: &'static str) -> Result<Option<i64>> {
        match self.named.attribute(name) {
            None => Ok(None),
            Some(Attribute::Int(value)) => Ok(Some(value)),
            Some(_) => Err(wrong(name, "an integer")),
        }
    }

    fn bool(&mut self, name: &'static str) -> Result<Option<bool>> {
        match self.named.attribute(name) {
            None => Ok(None),
            Some(Attribute::Bool(value)) => Ok(Some(value)),
            Some(_) => Err(wrong(name, "a truth value")),
        }
    }

    fn float(&mut self, name: &'static str) -> Result<Option<f64>> {
        match self.named.attribute(name) {
            None => Ok(None),
            Some(Attribute::Float(value)) => Ok(Some(value)),
            Some(_) => Err(wrong(name, "a float")),
        }
    }

    fn optional_float(&mut self, name: &'static str) -> Result<Option<f64>> {
        self.float(name)
    }
}

fn wrong(name: &str, expected: &str) -> Failure {
    Failure::value(format!("the attribute {name} is of another type, expected {expected}"))
}
