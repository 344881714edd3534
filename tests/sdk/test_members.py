"""The router's table of members against the SDK's: a member that OpenAI adds is to get a row, and with it a decision."""

import pathlib
import re
import unittest

from openai.types.responses import response_create_params as params

TABLE = pathlib.Path(__file__).parents[2] / "src" / "responses" / "member_table.rs"


class Members(unittest.TestCase):
    def test_every_member_of_a_create_has_a_row(self):
        rows = set(re.findall(r'\b(?:copied|native|own|reserved)\(\s*"(\w+)"', TABLE.read_text()))
        self.assertGreater(len(rows), 50)
        asked = set(params.ResponseCreateParamsStreaming.__annotations__)
        self.assertIn("temperature", asked)
        self.assertEqual(set(), asked - rows)


if __name__ == "__main__":
    unittest.main()
