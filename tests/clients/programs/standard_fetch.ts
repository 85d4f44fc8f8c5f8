/** The typescript-fetch client of OpenAPI Generator runs a session, a pause, its activation, a resume, and each chat API. */
import { deepStrictEqual as equal, ok } from 'node:assert';

import { AnthropicApi, BreakpointsApi, Configuration, OpenaiApi, SessionsApi } from './fetch';

async function main(): Promise<void> {
    const configuration = new Configuration({ basePath: process.argv[2] });
    const sessions = new SessionsApi(configuration);
    const breakpoints = new BreakpointsApi(configuration);
    const openai = new OpenaiApi(configuration);
    const anthropic = new AnthropicApi(configuration);

    const { id: sessionId } = await sessions.createSession();
    const breakpointBody = { layer: 1, action: 'pause', once: true } as const;
    equal((await breakpoints.createBreakpoint({ sessionId, breakpointBody })).layers, [1]);

    const generateBody = { tokenIds: [5, 6, 7], maxTokens: 4, ignoreEos: true };
    const paused = await sessions.generate({ sessionId, generateBody });
    equal([paused.status, paused.checkpoint?.layer, paused.finishReason], ['paused', 1, null]);
    const body = await breakpoints.getActivation({ sessionId });
    equal((await breakpoints.putActivation({ sessionId, body })).shape, paused.checkpoint?.shape);

    const resumeBody = { edits: [{ op: 'scale', factor: 1, positions: 'last' } as const], until: 'end' };
    const finished = await breakpoints.resumeSession({ sessionId, resumeBody });
    equal([finished.status, finished.tokenIds.length, finished.finishReason], ['finished', 4, 'length']);

    const model = (await openai.listModels()).data[0].id;
    const greedy = { model, temperature: 0, ignoreEos: true };
    const messages = [{ role: 'user' as const, content: 'Hello' }];
    const answer = await openai.createChatCompletion({ chatBody: { ...greedy, messages, maxTokens: 4 } });
    equal(answer.usage.completionTokens, 4);
    const text = answer.choices[0].message.content;
    ok(text);

    const response = await openai.createResponse({ responseBody: { ...greedy, input: messages, maxOutputTokens: 4 } });
    const said = response.output.flatMap((item) => (item.type === 'message' ? item.content : []));
    equal(said.map((part) => part.type === 'output_text' && part.text), [text]);
    equal(await openai.getResponse({ responseId: response.id }), response);

    const blocks = [{ role: 'user' as const, content: [{ type: 'text', text: 'Hello' }] }];
    const message = await anthropic.createMessage({ messagesBody: { ...greedy, messages: blocks, maxTokens: 4 } });
    equal(message.content.map((block) => block.type === 'text' && block.text), [text]);
}

main().catch((error) => {
    console.error(error);
    process.exitCode = 1;
});
